"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const KINDS = ["positive", "ambiguous", "identity"];
const TITLES = { positive: "Mined, positive", ambiguous: "Ambiguous", identity: "Same picture and caption" };
const PAGE = 24, FIRST = 6;
const byId = id => document.getElementById(id);
const whole = n => n.toLocaleString("en-US");
const total = found => found.reduce((sum, entry) => sum + entry[5], 0);
const percent = x => x === null ? "–" : (100 * x).toFixed(1) + " %";

/* Every text on this page goes through here: textContent, never markup. */
function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}
function svg(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
function picture(image) {
  if (!image.src) return document.createTextNode("no picture");
  const made = element("img");
  made.src = image.src; made.alt = image.name; made.decoding = "async";
  return made;
}

function showSummary() {
  const lead = byId("lead");
  lead.append(element("b", "", data.edges), " in ", element("b", "", data.workspace),
    `: ${whole(data.judgements)} combinations that the data set does not record, judged by ${data.discriminator}.`);
  for (const note of data.notes) byId("notes").append(element("p", "note" + (data.doubtful ? " doubtful" : ""), note));
  document.title = `Mined connections: ${data.edges}`;
  const figures = [
    ["", whole(data.judgements), "combinations judged"],
    ["positive", whole(data.counts.positive), "mined positives"],
    ["ambiguous", whole(data.counts.ambiguous), "ambiguous"],
    ["identity", whole(data.counts.identity), "by identity, not judged"],
  ];
  if (data.truth) figures.push(
    ["", percent(data.truth.precision), "of the mined positives are true"],
    ["", percent(data.truth.recall), "of the true ones judged were found"],
    ["", data.truth.average_precision === null ? "–" : data.truth.average_precision.toFixed(3), "average precision"]);
  for (const [kind, value, words] of figures) {
    const figure = element("div", "panel figure " + kind);
    figure.append(element("strong", "", value), element("span", "", words));
    byId("figures").append(figure);
  }
}

function showHistogram() {
  const counts = data.histogram, n = counts.length, width = 420, height = 190, top = Math.max(1, ...counts);
  const [low, high] = data.tau, drawing = svg("svg", { viewBox: `0 -14 ${width} ${height + 36}`, role: "img", "aria-label": "Histogram of match probability" });
  counts.forEach((count, bin) => {
    const middle = (bin + .5) / n, kind = middle > high ? "positive" : middle < low ? "negative" : "ambiguous";
    /* The square root lets rare bins be seen beside the many clear negatives. */
    const h = count ? Math.max(2, height * Math.sqrt(count / top)) : 0;
    const bar = svg("rect", { x: bin * width / n + 1, y: height - h, width: width / n - 2, height: h, rx: 2, class: "bar-" + kind });
    bar.append(svg("title", {}, `p ${(bin / n).toFixed(2)} to ${((bin + 1) / n).toFixed(2)}: ${whole(count)}`));
    drawing.append(bar);
  });
  drawing.append(svg("line", { x1: 0, x2: width, y1: height + .5, y2: height + .5, class: "axis" }));
  for (const value of new Set([low, high])) drawing.append(svg("line", { x1: value * width, x2: value * width, y1: -8, y2: height, class: "tau" }));
  for (const value of [0, .25, .5, .75, 1]) drawing.append(svg("text", { x: value * width, y: height + 17, "text-anchor": value === 0 ? "start" : value === 1 ? "end" : "middle" }, String(value)));
  byId("histogram").append(drawing);
  byId("histogram-note").textContent = `Bar heights are square roots of counts. Dashed: below ${+low.toFixed(3)} negative, above ${+high.toFixed(3)} positive.`;
}

function showMostConnected() {
  for (const image of data.topImages) {
    const button = element("button");
    button.title = image.name;
    button.append(picture(image), element("span", "count", whole(image.count)));
    button.addEventListener("click", () => searchFor(image.name));
    byId("top-images").append(button);
  }
  for (const { caption, count } of data.topCaptions) {
    const item = element("li"), button = element("button");
    button.append(element("span", "words", caption), element("span", "times", whole(count)));
    button.title = caption;
    button.addEventListener("click", () => searchFor(caption));
    item.append(button);
    byId("top-captions").append(item);
  }
}

const view = { words: "", kinds: new Set(KINDS), least: 0, most: 1, marked: "", order: "count", page: 0, cards: [] };

for (const image of data.images) {
  image.low = [image.name, ...image.recorded].join("\n").toLowerCase();
  for (const entry of image.found) entry.push(entry[1].toLowerCase());
}

/* An image is shown with those of its connections that pass. A word in its name or records passes them all. */
function select() {
  const { words, kinds, least, most, marked } = view;
  const parts = words.toLowerCase().split(/\s+/).filter(Boolean), phrase = words.toLowerCase().trim();
  const hit = text => !phrase || text.includes(phrase) || parts.every(part => text.includes(part));
  const cards = [];
  for (const image of data.images) {
    const all = hit(image.low);
    const found = image.found.filter(([kind, , p, , truth, , low]) =>
      kinds.has(KINDS[kind]) && p >= least - 1e-9 && p <= most + 1e-9 && (marked === "" || truth === +marked) && (all || hit(low)));
    if (found.length) cards.push({ image, found });
  }
  const orders = {
    count: (a, b) => b.positives - a.positives || b.judged - a.judged || b.count - a.count,
    high: (a, b) => b.best - a.best,
    low: (a, b) => a.worst - b.worst,
    id: () => 0,
  };
  for (const card of cards) {
    /* What nobody judged is certain by a rule: images that have nothing else stand last. */
    const judged = card.found.filter(([kind]) => KINDS[kind] !== "identity"), p = judged.map(entry => entry[2]);
    card.best = Math.max(-1, ...p); card.worst = Math.min(2, ...p);
    card.positives = total(judged.filter(([kind]) => KINDS[kind] === "positive"));
    card.judged = total(judged); card.count = total(card.found);
  }
  const inOrder = orders[view.order];
  view.cards = cards.sort((a, b) => inOrder(a, b) || a.image.id - b.image.id);
  view.page = Math.min(view.page, Math.max(0, Math.ceil(cards.length / PAGE) - 1));
}

function withMarks(text, holder) {
  const phrase = view.words.trim().toLowerCase(), at = phrase ? text.toLowerCase().indexOf(phrase) : -1;
  if (at < 0) { holder.append(text); return holder; }
  holder.append(text.slice(0, at), element("mark", "", text.slice(at, at + phrase.length)), text.slice(at + phrase.length));
  return holder;
}

function connection([, caption, p, similarity, truth, times]) {
  const item = element("li"), words = element("span", "words"), numbers = element("span", "numbers");
  if (truth !== null) {
    const mark = element("span", "mark " + (truth ? "true" : "false"), truth ? "✓" : "✗");
    mark.title = truth ? "true" : "false";
    words.append(mark);
  }
  withMarks(caption, words);
  if (times > 1) { const more = element("span", "times", ` ×${times}`); more.title = `the caption of ${times} pairs`; words.append(more); }
  numbers.append(element("b", "", "p " + p.toFixed(2)), element("span", "similarity", "sim " + similarity.toFixed(2)));
  item.append(words, numbers);
  return item;
}

function group(kind, entries) {
  const part = element("section", "found " + kind), list = element("ul");
  part.append(element("p", "kind", TITLES[kind]));
  entries.slice(0, FIRST).forEach(entry => list.append(connection(entry)));
  part.append(list);
  if (entries.length > FIRST) {
    const more = element("button", "more", `${entries.length - FIRST} more`);
    more.addEventListener("click", () => { entries.slice(FIRST).forEach(entry => list.append(connection(entry))); more.remove(); });
    part.append(more);
  }
  return part;
}

function card({ image, found }) {
  const made = element("article", "panel card"), head = element("div", "card-head"), frame = element("div", "frame"), side = element("div");
  frame.append(picture(image));
  const recorded = element("ul", "recorded");
  for (const caption of image.recorded) recorded.append(withMarks(caption, element("li")));
  side.append(withMarks(image.name, element("p", "name")), element("p", "kind", "Recorded"), recorded);
  head.append(frame, side);
  made.append(head);
  KINDS.forEach((kind, code) => {
    const entries = found.filter(entry => entry[0] === code);
    if (entries.length) made.append(group(kind, entries));
  });
  return made;
}

function showPager(holder) {
  const pages = Math.ceil(view.cards.length / PAGE);
  holder.replaceChildren();
  if (pages < 2) return;
  const turn = (words, to) => {
    const button = element("button", "", words);
    button.disabled = to < 0 || to >= pages;
    button.addEventListener("click", () => { view.page = to; show(); byId("filters").scrollIntoView(); });
    return button;
  };
  holder.append(turn("Previous", view.page - 1), element("span", "", `${whole(view.page + 1)} of ${whole(pages)}`), turn("Next", view.page + 1));
}

function show() {
  select();
  const cards = byId("cards"), shown = view.cards.slice(view.page * PAGE, (view.page + 1) * PAGE);
  cards.replaceChildren(...shown.map(card));
  if (!shown.length) cards.append(element("p", "nothing", data.shown ? "No connection passes these filters." : "Nothing positive or ambiguous was found."));
  const connections = view.cards.reduce((sum, { count }) => sum + count, 0);
  byId("state").textContent = `${whole(connections)} connections of ${whole(view.cards.length)} images`;
  showPager(byId("pager-top"));
  showPager(byId("pager-bottom"));
}

function searchFor(words) { byId("search").value = words; change({ words }); byId("filters").scrollIntoView(); }
function change(to) { Object.assign(view, to, { page: 0 }); show(); }

function listen() {
  const counts = [0, 0, 0];
  for (const image of data.images) for (const entry of image.found) counts[entry[0]] += entry[5];
  KINDS.forEach((kind, code) => {
    if (!counts[code]) return;
    const toggle = element("button", "toggle " + kind, `${kind[0].toUpperCase()}${kind.slice(1)} ${whole(counts[code])}`);
    toggle.setAttribute("aria-pressed", "true");
    toggle.addEventListener("click", () => {
      const on = !view.kinds.has(kind);
      if (on) view.kinds.add(kind); else view.kinds.delete(kind);
      toggle.setAttribute("aria-pressed", String(on));
      change({});
    });
    byId("kinds").append(toggle);
  });
  let waiting;
  byId("search").addEventListener("input", event => { clearTimeout(waiting); waiting = setTimeout(() => change({ words: event.target.value }), 120); });
  for (const bound of ["least", "most"]) byId(bound).addEventListener("input", event => {
    byId(bound + "-value").textContent = (+event.target.value).toFixed(2);
    change({ [bound]: +event.target.value });
  });
  byId("order").addEventListener("change", event => change({ order: event.target.value }));
  byId("marked").addEventListener("change", event => change({ marked: event.target.value }));
  if (!data.truth) byId("marked").hidden = true;
  const dark = on => { document.documentElement.dataset.theme = on ? "dark" : "light"; byId("theme").textContent = on ? "Light" : "Dark"; };
  dark(matchMedia("(prefers-color-scheme: dark)").matches);
  byId("theme").addEventListener("click", () => dark(document.documentElement.dataset.theme !== "dark"));
}

showSummary(); showHistogram(); showMostConnected(); listen(); show();
byId("footer").textContent = (data.shown < data.total
  ? `${whole(data.shown)} of ${whole(data.total)} connections are on this page, evenly drawn by p; the figures on top are of all. ` : "")
  + "Negative combinations are not shown. Made by fnpipe.";
document.documentElement.dataset.ready = "yes";
