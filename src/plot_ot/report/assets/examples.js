// Base and source prompts with what the model said before and after the swap. Everything is set as text, never as HTML.

const PAGE = 10;
const filters = { right: "all", family: "all", variable: "all", shown: PAGE };

function wantedExamples() {
  const mine = (data.examples?.[String(picked.seed)] ?? []).filter((e) => e.method === picked.method);
  return tellingFirst(mine).filter((e) => (filters.right === "all" || e.right === (filters.right === "right")) && (filters.family === "all" || String(e.family) === filters.family) && (filters.variable === "all" || e.variable === filters.variable));
}

// 2: neither doing nothing, copying the source nor swapping another variable is right; 1: copying is; 0: cannot tell.
const telling = (e) => ((e.discriminating ?? e.expected !== e.before) ? (e.expected !== e.source_answer ? 2 : 1) : 0);
const tellingFirst = (some) => [...some].sort((a, b) => telling(b) - telling(a));

// The prompt with the tokens at the edited positions marked; positions count characters, as Python does.
function promptText(prompt, spans) {
  const values = !spans.length && /^\S+ = [^,\n]+(, \S+ = [^,\n]+)*$/.test(prompt); // numbers by name: no line break inside one
  const letters = Array.from(values ? prompt.replaceAll(" = ", "\u00a0=\u00a0") : prompt);
  const pre = element("pre", { dir: "auto" });
  let from = 0;
  for (const [start, end] of [...spans].sort((a, b) => a[0] - b[0])) {
    if (!(start >= from && end > start)) continue;
    pre.append(letters.slice(from, start).join(""), element("mark", {}, letters.slice(start, end).join("")));
    from = end;
  }
  pre.append(letters.slice(from).join(""));
  return pre;
}

function exampleCard(e) {
  const positions = [e.position ?? []].flat().filter((p) => p && typeof p === "object");
  const spans = (side) => positions.map((p) => p[side]).filter((s) => Array.isArray(s) && s.length === 2);
  const labels = positions.map((p) => p.label).filter(Boolean).join(", ");
  const same = e.expected === e.source_answer;
  const said = [["without the swap", e.before], ["with the swap", e.after], ["expected by the causal model", e.expected], [same ? "copying the source would say" : "copying the source would wrongly say", e.source_answer]];
  const prompt = (title, value, side) => element("div", {}, element("div", { class: "muted" }, title), promptText(value, spans(side)));
  return element("article", { class: `example ${e.right ? "right" : "wrong"}` },
    element("div", { class: "head" }, element("b", {}, e.right ? "✓ right" : "✗ wrong"), element("span", {}, e.variable), e.family && e.family !== "all" ? element("span", {}, `kind of pair: ${e.family}`) : null, labels ? element("span", {}, `swapped at: ${labels}`) : null),
    element("div", { class: "prompts" }, prompt("base: what the network is asked", e.base_prompt, "base"), prompt(`source: where ${e.variable} is taken from`, e.source_prompt, "source")),
    element("dl", {}, ...said.filter(([, x]) => x !== undefined && x !== null).map(([title, x], k) => element("div", { class: k === 1 ? "after" : "" }, element("dt", {}, title), element("dd", { dir: "auto" }, String(x))))));
}

// One pair of the variable that is looked at: the first that tells most, with the outcome that most such pairs have.
function drawOne() {
  const box = document.getElementById("example-one");
  if (!box) return;
  const mine = tellingFirst((data.examples?.[String(picked.seed)] ?? []).filter((e) => e.method === picked.method && e.variable === zoom.variable));
  const verdict = (data.results.verdicts ?? []).find((v) => v.method === picked.method && v.seed === picked.seed && v.variable === zoom.variable);
  const share = verdict?.evidence?.handle;
  const usual = typeof share === "number" ? share >= 0.5 : !verdict || /^(placed|in part)/.test(verdict.status);
  const best = mine.filter((e) => telling(e) === telling(mine[0]));
  const shown = best.find((e) => e.right === usual) ?? best[0];
  box.replaceChildren(...(shown ? [exampleCard(shown)] : []));
  const of = typeof share === "number" ? ` The handle is right on ${percent(share)} of the test pairs that can tell.` : "";
  const kind = telling(shown ?? {}) === 2 ? "that doing nothing and copying the source would both get wrong" : "that the swap should change";
  document.getElementById("example-why").textContent = shown ? `A test pair ${kind}, for ${zoom.variable}.${of}` : `No example of ${picked.method} on ${zoom.variable} in seed ${picked.seed} was kept.`;
}

function drawExamples() {
  const box = document.getElementById("example-list");
  if (!box) return;
  const wanted = wantedExamples();
  const shown = wanted.slice(0, filters.shown);
  document.getElementById("example-count").textContent = wanted.length ? `${shown.length} of ${wanted.length} examples of ${picked.method}, seed ${picked.seed}` : `No example of ${picked.method} in seed ${picked.seed} passes these filters.`;
  box.replaceChildren(...shown.map(exampleCard));
  if (shown.length < wanted.length) box.append(element("button", { type: "button", onclick: () => { filters.shown += PAGE; drawExamples(); } }, "Show more"));
}

function wireExamples() {
  for (const select of document.querySelectorAll("[data-filter]")) {
    select.addEventListener("change", () => { filters[select.dataset.filter] = select.value; filters.shown = PAGE; drawExamples(); });
  }
}
