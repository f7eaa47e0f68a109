"""Makes the vocabulary of fnpipe-tiny: 1,000 byte-level BPE pieces, from the words below.

    python tools/tiny_vocabulary.py

rewrites train/assets/fnpipe-tiny-vocabulary.json. The words are the grammar of the drawn scenes (``SCENE``, so frequent
that each becomes one piece) and common English for short captions (``COMMON``, most of them one to three pieces).
Anything else, in any script, falls back to its UTF-8 bytes.
"""

from __future__ import annotations

import argparse
import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from fnpipe.train.model.tokenizer import SPECIAL_TOKENS, TINY_VOCABULARY

PIECES = 1000

SCENE = """
red crimson scarlet green lime emerald blue azure yellow golden purple violet orange amber white ivory black dark grey
gray pink rose teal cyan turquoise brown beige navy olive sky magenta maroon silver plain
circle disc disk square box triangle cross plus diamond rhombus bar stripe star ring ellipse oval hexagon heart arrow
small tiny little big large huge medium left right top bottom middle centre center corner upper lower above over below
under beneath beside next to of near between side edge row column
a an the in at on and with without is are one two three image picture drawing scene photo shape shapes object
background backdrop ground colour color coloured colored
"""

COMMON = """
about across after again against age air airplane alarm alien all along ambulance amid anchor angel angry animal ant
apple arm around arrows art artist asia astronaut at australia autumn avocado away axe baby back backhand backpack bag
bald ball balloon bamboo banana band bank barber baseball basket basketball bat bath bathtub battery beach bead bear
beard beaver bed bee beer beetle bell belt bench bicycle bikini bird birthday biting bite blond blossom blowing boar
board boat body bolt bomb bone book books boom boot bottle bow bowing bowl bowling boxing boy brain branch bread
breast brick bride bridge briefcase bright broccoli broken broom bubble bucket bug building bullet bun burger burrito
bus business bust butter butterfly button cabinet cable cactus cake calendar call camel camera camp can candle candy
canned canoe cap car card care carousel carp carpentry carrot cart castle cat chain chair champagne chart check cheek
cheering cheese chef chequered cherry chess chestnut chick chicken child children chipmunk chocolate chopsticks church
cigarette cinema city clap clapping class clean cleaver climbing clink clip clipboard clock closed closing cloud clown
club coaster coat cockroach cocktail coconut coffee coffin coin cold collision comet compass compression computer
condor construction control cook cookie cooking cool corn couch couple cow cowboy crab cracker crayon credit crescent
cricket crocodile croissant crown cruise crutch cry crying crystal cucumber cup cupid curly curry currency cycling
cyclone dagger dance dancer dancing dango dash date day deaf deer delivery department derelict desert desktop
detective dice disguise diving dizzy dog doll dollar dolphin door dotted double dove down dragon dress dripping droplet
drum duck dumpling dvd eagle ear earth east egg eight electric elephant elevator eleven elf email empty end engine
envelope euro evergreen exclamation expression expressionless eye eyebrow eyeglasses eyes face facing factory fairy
falafel fallen family farmer fast father fax fearful feather female fencer ferris ferry field file film finger fingers
fire fireworks first fish fishing fist five flag flamingo flash flat flatbread fleur floppy flower flushed fly flying
fog fold folded folder food foot football footprints fork fountain four fox frame free french fried fries frog front
frown frowning fruit fuel full funeral game garlic gear gem genie ghost ginger giraffe girl glass glasses globe glove
glowing goal goat goblin goggles golf gorilla grapes grasshopper greeting grimacing grin grinning growing guard guide
guitar gun hair haircut half hamburger hammer hamster hand handbag handle hands handshake hat hatching head headphone
headscarf hear hearing hearts heavy hedgehog heel helicopter helmet herb high hiking hindu hippopotamus hockey hold
holding hole home honey hook horn horse hospital hot hotel hour hourglass house hug hugging hundred hut ice icon
identification inbox index infinity information input island japanese jar jeans joker joy judge juggling juice
kaaba kangaroo key keyboard kick kimono king kiss kissing kitchen kite kiwi knife knight knot koala label lab
lacrosse ladder lady lamp laptop last laughing leaf leafy leaves ledger leg lemon leopard letter level lift light
lightning link lion lips lipstick litter lizard llama lobster lock locked log lollipop long lotion loud love low
luggage lungs machine mage magic magnet magnifying mail mailbox male mammoth man mango mantelpiece map maple mark mask
mate meat mechanic medal memo men menorah mermaid metro microbe microphone microscope military milk minus mirror mobile
money monkey monorail moon mosque mosquito moth mother motor motorcycle motorway mountain mouse mouth movie moyai
musical mushroom musician nail name national nature nazar neck necktie nerd nest net neutral new newspaper night nine
ninja no north nose note notebook number nurse nut ocean octopus office official oil old oncoming onion open
ophiuchus optical orangutan otter outbox owl oyster package page paint palette palm palms pancakes panda paper
parachute park parrot part party passenger passport peach peacock peanut pear pen pencil penguin pensive people pepper
performing person petri phone pick pie pig pilot pill pin pine pineapple pistol pizza placard plane planet plant plate
playing pleading plug point pointing polar police pool poodle popcorn post postal postbox pot potable potato pouch
poultry pound pouting prayer pregnant present pretzel prince princess printer prohibited puffer punch purse pushpin
puzzle queen question rabbit raccoon racing radio radioactive railway rain rainbow raised raising ram rat razor
receipt record recycling regional relieved reminder repeat rescue restroom reverse rhinoceros ribbon rice right
robot rock rocket roll rolling roller roof room rooster round rowing rugby ruler running safety sad sailboat
sake salad salt sandal sandwich santa sari satellite sauna sausage saxophone scale scarf school science scientist
scissors scooter scorpion screen screwdriver scroll seal seat second see seedling seven shark sheaf sheep shell shield
shinto ship shirt shoe shooting shop shopping shorts shot shower shrimp shrug shuffle sign silhouette singer six
skateboard ski skier skin skull skunk slash sled sleep sleeping sleepy slice slot sloth slow smile smiling smirk
smoking snail snake sneezing snow snowboarder snowflake snowman soap soccer socks soft sofa softball soon south
spade spaghetti sparkle sparkler sparkles speaker speech speedboat spider spiral spoon sponge sport spouting squid
squinting stadium staff statue steam steaming stethoscope stop stopwatch straight strawberry street student studio
stuffed suit sun sunflower sunglasses sunrise sunset superhero supervillain surfing sushi swan sweat sweet swim
swimming symbol synagogue syringe table taco takeout tanabata tangerine taxi tea teacher tear tears technologist
teddy telephone telescope television temple ten tennis tent test text theatre thermometer thinking thought thread
thumbs thunder ticket tie tiger time timer tired toilet tokyo tomato tone tongue tool tooth toothbrush tower toy track
tractor trade traffic train tram tray tree trident trolley trophy tropical truck trumpet tulip tumbler turban turkey
turtle twelve twisted umbrella unamused unicorn universal up upside vampire vertical vest vhs victory video videogame
violin volcano volleyball vulcan waffle walking waning wand warning washing watch water watermelon wave waving waxing
wearing weary wedding weight west whale wheel wheelchair wide wilted wind window wine wing wink winking wolf
woman women wood wooden wool work worker world worm worried wrapped wrench wrestling writing yarn yawning year yen
yoga young zany zebra zero zipper zombie zone
be been but by can come could do does each for from get go has have he her here his how if into it its like make many
may more most much must my not now off often only or other our out own people place say shown she so some standing
sitting such take than that their them then there these they thing this those through today together too toward use
very was watching way we were what when where which while who will would year you your
black cat white dog young man old woman group people riding holding standing sitting street table field water
ed er est ing ion ly ment ness s es tion al ous ive able ful less un re dis pre
"""


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(SCENE.split())] * 100 + [" ".join(COMMON.split())], trainer)
    text = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=True, separators=(",", ":")) + "\n"
    TINY_VOCABULARY.write_text(text)
    whole = sum(len(tokenizer.encode(word).ids) == 1 for word in COMMON.split())
    summary = {
        "pieces": tokenizer.get_vocab_size(),
        "bytes": len(text),
        "whole_common": whole,
        "common": len(COMMON.split()),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
