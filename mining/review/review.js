"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);
const AHEAD = 30, LOW = 10, PRELOADED = 4, RETRY_MS = 2000;
/* What is to be asked next, what this tab has answered, and answers on their way to the disk, in their order. */
let queue = [], history_ = [], sending = Promise.resolve();
let reviewer = "", asked = 0, answered = 0, behind = -1, exhausted = false, loading = null, showP = false, unsent = 0;
const preloaded = new Map();

/* The token is in a cookie by now; an address that is copied should not carry it. */
history.replaceState(null, "", "/");
byId("lead").textContent = `edges ${data.edges} of ${data.workspace}`;

function say(text) { byId("trouble").textContent = text; byId("trouble").hidden = !text; }
async function ask(path, options) {
  const answer = await fetch(path, options);
  const body = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(body.error), { final: answer.status < 500 });
  return body;
}
/* An id of its own lets an answer be sent again when it is not known whether it arrived. */
function send(position, verdict) {
  const id = Array.from(crypto.getRandomValues(new Uint32Array(4)), n => n.toString(16).padStart(8, "0")).join("");
  const body = JSON.stringify({ id, position, reviewer, verdict });
  unsent++;
  sending = sending.then(async () => {
    for (;;) {
      try {
        await ask("/answers", { method: "POST", headers: { "content-type": "application/json" }, body });
        unsent--;
        return say("");
      } catch (error) {
        say(error.final ? `An answer was refused: ${error.message}` : `${unsent} not saved yet, trying again: ${error.message}`);
        if (error.final) { unsent--; return; }
        await new Promise(done => setTimeout(done, RETRY_MS));
      }
    }
  });
}
function refill() {
  if (exhausted || loading) return loading;
  const query = new URLSearchParams({ reviewer, after: behind, count: AHEAD });
  loading = ask(`/items?${query}`).then(more => {
    if (behind < 0) { asked = more.asked; answered = more.answered; if (more.last && !history_.length) history_.push(more.last); }
    exhausted = more.items.length < AHEAD;
    if (more.items.length) behind = more.items[more.items.length - 1].position;
    queue.push(...more.items);
  }).catch(error => { say(error.message); setTimeout(() => refill().then(show), RETRY_MS); }).finally(() => { loading = null; });
  return loading;
}
function preload() {
  const soon = new Set(queue.slice(0, PRELOADED + 1).map(item => item.image));
  for (const image of preloaded.keys()) if (!soon.has(image)) preloaded.delete(image);
  for (const image of soon) {
    if (!preloaded.has(image)) { const made = new Image(); made.src = `/pictures/${image}`; preloaded.set(image, made); }
  }
}
function show() {
  byId("count").textContent = `${answered.toLocaleString("en-US")} of ${asked.toLocaleString("en-US")}`;
  byId("progress").max = asked || 1; byId("progress").value = answered;
  byId("undo").disabled = byId("undo-last").disabled = !history_.length;
  const item = queue[0];
  byId("question").hidden = !item;
  byId("done").hidden = !(!item && exhausted);
  if (!item) return exhausted ? sending.then(summarise) : undefined;
  byId("broken").hidden = true; byId("picture").hidden = false;
  if (byId("picture").dataset.image !== String(item.image)) {
    byId("picture").dataset.image = item.image; byId("picture").src = `/pictures/${item.image}`;
  } else if (byId("picture").complete && !byId("picture").naturalWidth) broken();
  byId("caption").textContent = item.caption;
  byId("p").textContent = showP ? `p = ${item.p.toFixed(4)}` : "";
  byId("recorded").replaceChildren(...item.recorded.map(text => Object.assign(document.createElement("li"), { textContent: text })));
  preload();
}
function broken() { byId("broken").hidden = false; byId("picture").hidden = true; }
byId("picture").addEventListener("error", broken);

async function answer(verdict) {
  if (!queue.length || byId("question").hidden) return;
  const item = queue.shift();
  history_.push(item); answered++;
  send(item.position, verdict);
  show();
  if (queue.length < LOW && !exhausted) { const empty = !queue.length; await refill(); if (empty) show(); }
}
function undo() {
  const item = history_.pop();
  if (!item) return;
  queue.unshift(item); answered--;
  send(item.position, "undo");
  show();
}
async function summarise() {
  const found = await ask("/summary").catch(error => say(error.message));
  if (!found) return;
  byId("totals").textContent = `${found.answers} answers to ${found.edges} edges, by ${found.reviewers.join("; ") || "nobody"}.`;
  const row = (tag, cells) => {
    const made = document.createElement("tr");
    cells.forEach((text, at) => made.append(Object.assign(document.createElement(at ? tag : "th"), { textContent: text })));
    return made;
  };
  const percent = share => share === null ? "–" : (100 * share).toFixed(1);
  const lines = found.told.filter(at => at.edges).map(at => row("td", [
    `${at.threshold}${at.threshold === found.tau_high ? " (labels)" : ""}`, at.edges.toLocaleString("en"), at.answered,
    percent(at.precision), `${percent(at.low)} to ${percent(at.high)}`]));
  byId("summary").replaceChildren(row("th", ["p above", "edges", "asked", "right, %", "with 95 %"]), ...lines);
}
async function start(name) {
  reviewer = name; byId("who").hidden = true;
  sessionStorage.setItem("reviewer", name);
  await refill(); show();
}
const KEYS = { y: () => answer("yes"), n: () => answer("no"), u: () => answer("unsure"), z: undo };
document.addEventListener("keydown", event => {
  if (event.repeat || event.ctrlKey || event.metaKey || event.altKey || event.target.id === "name") return;
  const does = KEYS[event.key.toLowerCase()];
  if (does && !byId("who").checkVisibility()) { event.preventDefault(); does(); }
});
for (const button of document.querySelectorAll("[data-verdict]")) button.addEventListener("click", () => answer(button.dataset.verdict));
byId("undo").addEventListener("click", undo); byId("undo-last").addEventListener("click", undo);
byId("toggle").addEventListener("click", () => {
  showP = !showP;
  byId("toggle").textContent = showP ? "Hide p" : "Show p"; byId("toggle").setAttribute("aria-pressed", showP);
  show();
});
byId("who").addEventListener("submit", event => {
  event.preventDefault();
  const name = byId("name").value.trim();
  /* The server says which names it takes. */
  ask(`/items?${new URLSearchParams({ reviewer: name, after: -1, count: 0 })}`).then(() => { say(""); start(name); }, error => say(error.message));
});
addEventListener("beforeunload", event => { if (unsent) event.preventDefault(); });
const kept = data.known ? data.reviewer : sessionStorage.getItem("reviewer");
if (kept) start(kept);
else { byId("name").value = data.reviewer; byId("who").hidden = false; byId("name").focus(); }
