"""From the members of a tar to samples: which belong together, and which cannot be used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fnpipe.pipeline.files.tars import Damage, Member, read_members
from fnpipe.pipeline.files.text import composed
from fnpipe.pipeline.sources.source import IMAGE_EXTENSIONS

_TEXT_FIELDS = ("txt", "json")


@dataclass
class Sample:
    """The members that share a key.

    Attributes:
        fields: member by field name (the extension, lower case).
        reason, detail: why the sample cannot be used, where that is known from the headers.
    """

    key: str
    fields: dict[str, Member] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    reason: str = ""
    detail: str = ""

    @property
    def images(self) -> list[str]:
        """The fields that are images by their extension; the first one counts."""
        return [name for name in self.fields if "." + name.rpartition(".")[2] in IMAGE_EXTENSIONS]

    @property
    def image(self) -> Member | None:
        return next((self.fields[name] for name in self.images), None)

    def text(self, name: str) -> bytes | None:
        """The content of the member whose extension is ``name`` (``txt`` or ``json``)."""
        for known, content in self.texts.items():
            if known.rpartition(".")[2] == name:
                return content
        return None


@dataclass
class TarIndex:
    """What a tar holds: its samples in order, and where it is damaged. ``fields`` counts samples by field."""

    samples: list[Sample]
    damage: list[Damage]
    fields: dict[str, int]


def index_tar(path: str) -> TarIndex:
    """Read what an uncompressed tar holds; no image is read.

    Raises:
        InputError: the file is no tar at all.
    """
    members, texts, damage = read_members(path)
    samples = _group(members, texts)
    fields: dict[str, int] = {}
    for sample in samples:
        for name in sample.fields:
            fields[name] = fields.get(name, 0) + 1
    return TarIndex(samples, damage, fields)


def _group(members: list[Member], texts: dict[int, bytes]) -> list[Sample]:
    """Samples in the order of their first member.

    The last dot of a name parts key and field. Where no sample comes out whole, the first dot of the base name does,
    as WebDataset reads names like ``s0.input.png`` with ``s0.output.txt``.
    """
    useful = [member for member in members if not _is_clutter(member)]
    samples = _group_by(useful, texts, last_dot=True)
    if useful and not any(_is_whole(sample) for sample in samples):
        others = _group_by(useful, texts, last_dot=False)
        if any(_is_whole(sample) for sample in others):
            return others
    return samples


def _group_by(members: Iterable[Member], texts: dict[int, bytes], *, last_dot: bool) -> list[Sample]:
    runs: dict[str, list[Sample]] = {}
    order: list[Sample] = []
    previous: Sample | None = None
    for member in members:
        key, name = _split(member.name, last_dot)
        reason, detail = _unusable(member)
        if reason and name in _TEXT_FIELDS and previous is not None and previous.key == key:
            continue  # the sample that it belongs to says no-caption
        if previous is None or previous.key != key or name in previous.fields:
            previous = Sample(key)
            runs.setdefault(key, []).append(previous)
            order.append(previous)
        previous.fields[name] = member
        if reason and not previous.reason:
            previous.reason, previous.detail = reason, detail
        if member.offset in texts:
            previous.texts[name] = texts[member.offset]
    for same in runs.values():
        if len(same) > 1:
            _join(same)
    return [sample for sample in order if sample.fields]


def _join(same: list[Sample]) -> None:
    """Bring members of one key together that do not stand together; two samples of one key stay two."""
    names = [name for sample in same for name in sample.fields]
    if len(names) == len(set(names)):
        first = same[0]
        for other in same[1:]:
            first.fields.update(other.fields)
            first.texts.update(other.texts)
            if other.reason and not first.reason:
                first.reason, first.detail = other.reason, other.detail
            other.fields = {}
    elif not all(_is_whole(sample) for sample in same):
        for sample in same:
            # Which text belongs to which image cannot be told.
            sample.reason, sample.detail = "bad-row", f"the key {sample.key!r} comes up again with parts missing"


def _is_whole(sample: Sample) -> bool:
    return sample.image is not None and bool(sample.texts)


def _split(name: str, last_dot: bool) -> tuple[str, str]:
    folder, slash, base = name.removeprefix("./").rpartition("/")
    if last_dot:
        stem, dot, extension = base.rpartition(".")
        if not dot:
            stem, extension = base, ""
    else:
        stem, _, extension = base.partition(".")
    return composed(folder + slash + stem), extension.lower()


def _is_clutter(member: Member) -> bool:
    """What other programs leave in an archive and no sample is made of."""
    if member.is_regular and "/" not in member.name and member.name[:1] not in "._DT":
        return False  # the common case, at the price of one look
    parts = member.name.removeprefix("./").rstrip("/").split("/")
    base = parts[-1]
    return (
        member.is_directory
        or base.startswith("._")
        or base in (".DS_Store", "Thumbs.db", "")
        or any(part.startswith("__") or part.partition(".")[0] == "PaxHeaders" for part in parts)
    )


def _unusable(member: Member) -> tuple[str, str]:
    if member.is_regular and ".." not in member.name and member.name[:1] != "/":
        return "", ""
    parts = member.name.split("/")
    if ".." in parts or member.name.startswith("/"):
        return "unsafe-member", f"{member.name!r} leads out of the archive"
    if member.is_link:
        return "not-a-file", f"{member.name!r} is a link"
    if not member.is_regular:
        return "not-a-file", f"{member.name!r} is no regular file"
    return "", ""
