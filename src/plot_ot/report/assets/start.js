// Wire the page, then draw its charts one after the other, so that it can be read and scrolled meanwhile.

function pick(change) {
  Object.assign(picked, change);
  for (const row of document.querySelectorAll("tr[data-method]")) row.classList.toggle("picked", row.dataset.method === picked.method);
  const judged = new Set([...document.querySelectorAll(".cards[data-method]")].map((c) => c.dataset.method));
  const shown = judged.has(picked.method) ? picked.method : data.best;
  for (const cards of document.querySelectorAll("[data-method-only]")) cards.hidden = cards.dataset.method !== shown;
  for (const name of document.querySelectorAll("[data-shown=method]")) name.textContent = shown;
  refreshZoom();
  drawOne();
  drawExamples();
  if (window.Plotly) followers.forEach(draw);
}

function redrawAll() {
  drawZoom();
  if (window.Plotly) figures().forEach(draw);
}

const figures = () => [...document.querySelectorAll("figure[data-chart]")].filter((f) => charts[f.dataset.chart] && !f.closest("[hidden]"));

function wirePickers() {
  for (const select of document.querySelectorAll("[data-pick]")) {
    select.addEventListener("change", () => pick({ [select.dataset.pick]: select.dataset.pick === "seed" ? Number(select.value) : select.value }));
    select.value = String(picked[select.dataset.pick]);
  }
  document.getElementById("theme").addEventListener("click", () => { setTheme(isDark() ? "light" : "dark"); redrawAll(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  for (const button of document.querySelectorAll("[data-save]")) {
    const what = button.dataset.save;
    if (what === "results") button.addEventListener("click", () => save("results.json", "application/json", JSON.stringify(data.results, null, 1)));
    else if (what === "page") button.addEventListener("click", () => save("page.json", "application/json", JSON.stringify(data, null, 1)));
    else button.addEventListener("click", () => saveList(what));
  }
  document.getElementById("zoom-close")?.addEventListener("click", closeStage);
  addEventListener("keydown", (event) => { if (event.key === "Escape" && zoom.open !== null) closeStage(); });
}

function wirePrinting() {
  let before;
  addEventListener("beforeprint", () => { before = root.dataset.theme; root.dataset.theme = "light"; redrawAll(); });
  addEventListener("afterprint", () => { if (before === undefined) delete root.dataset.theme; else root.dataset.theme = before; redrawAll(); });
  let width = root.clientWidth;
  addEventListener("resize", () => {
    if (root.clientWidth === width) return;
    width = root.clientWidth;
    drawZoom();
    figures().forEach((f) => f.built && draw(f));
  });
}

const breathe = () => new Promise((done) => setTimeout(done));

async function start() {
  wirePickers();
  wireExamples();
  variableButtons();
  pick({});
  wirePrinting();
  await loadLibrary();
  for (const f of document.querySelectorAll("figure[data-chart]")) {
    addTools(f);
    if ("follows" in f.dataset) followers.push(f);
  }
  for (const f of figures()) {
    await draw(f);
    await breathe();
  }
  root.dataset.ready = "yes";
  performance.mark("plot-ot drawn");
}

await start();
