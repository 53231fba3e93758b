// The comparison's charts: every run in its own colour.

const HUES = ["blue", "orange", "green", "purple", "vermillion", "sky", "grey"];
const hue = (k) => colour(HUES[k % HUES.length]);
const narrow = () => root.clientWidth < 640;

charts.frontier = () => {
  const traces = data.runs.map((run, k) => {
    const points = run.methods.filter((m) => m.kind !== "control" && m.accuracy.mean !== null && m.seconds.mean !== null);
    return { type: "scatter", mode: "markers", name: safe(run.name), x: points.map((m) => m.seconds.mean), y: points.map((m) => m.accuracy.mean), marker: { size: 11, color: hue(k), symbol: ["circle", "square", "triangle-up", "diamond"][k % 4] }, hoverinfo: "text",
      error_y: { type: "data", array: points.map((m) => m.accuracy.sd), color: colour("line"), thickness: 1.2, width: 0 },
      hovertext: points.map((m) => `${safe(run.name)}: ${safe(m.name)}<br>${fixed(m.accuracy.mean)} ± ${fixed(m.accuracy.sd)}<br>${fixed(m.seconds.mean, 2)} s`) };
  });
  data.published.forEach((paper) => traces.push({ type: "scatter", mode: "markers", name: `published: ${safe(paper.setting)}`, x: paper.points.map((p) => p.seconds), y: paper.points.map((p) => p.accuracy), hoverinfo: "text", marker: { size: 11, symbol: "diamond-open", color: colour("muted"), line: { width: 2 } },
    hovertext: paper.points.map((p) => `published: ${p.method}<br>${p.accuracy} ± ${p.accuracy_sd}<br>${p.seconds} s on ${safe(paper.machine)}`) }));
  if (!traces.some((t) => t.x.length)) return "No run has both accuracies and runtimes.";
  return {
    traces,
    layout: { height: 440, margin: { l: 8, r: 24, t: narrow() ? 90 : 50, b: 8 }, xaxis: { type: "log", title: { text: "seconds per seed, logarithmic" }, exponentformat: "none" }, yaxis: { title: { text: "average exact accuracy" } } },
    rows: [["run", "method", "accuracy", "sd", "seconds", "sd of seconds"], ...data.runs.flatMap((run) => run.methods.map((m) => [run.name, m.name, m.accuracy.mean, m.accuracy.sd, m.seconds.mean, m.seconds.sd]))],
  };
};

charts.accuracy = () => {
  const names = distinct(data.runs.flatMap((run) => run.methods.map((m) => m.name)));
  if (!names.length) return "No run has test accuracies.";
  const traces = data.runs.map((run, k) => {
    const mine = run.methods.filter((m) => m.accuracy.mean !== null);
    const shift = (k - (data.runs.length - 1) / 2) * Math.min(0.22, 0.7 / data.runs.length);
    return { type: "scatter", mode: "markers", name: safe(run.name), x: mine.map((m) => m.accuracy.mean), y: mine.map((m) => names.indexOf(m.name) + shift), hoverinfo: "text", marker: { size: 10, color: hue(k), symbol: ["circle", "square", "triangle-up", "diamond"][k % 4] },
      error_x: { type: "data", array: mine.map((m) => m.accuracy.sd), color: hue(k), thickness: 1.2, width: 0 }, hovertext: mine.map((m) => `${safe(run.name)}: ${safe(m.name)} ${fixed(m.accuracy.mean)} ± ${fixed(m.accuracy.sd)}`) };
  });
  return {
    traces,
    layout: { height: 100 + 34 * names.length, margin: { l: 8, r: 16, t: narrow() ? 80 : 44, b: 8 }, yaxis: { tickvals: names.map((_, k) => k), ticktext: names.map(safe), autorange: false, range: [names.length - 0.5, -0.5], showgrid: false, zeroline: false }, xaxis: { title: { text: "average exact accuracy" } } },
    rows: [["method", ...data.runs.map((r) => r.name)], ...names.map((n) => [n, ...data.runs.map((r) => r.methods.find((m) => m.name === n)?.accuracy.mean ?? null)])],
  };
};

const figures = [...document.querySelectorAll("figure[data-chart]")];
document.getElementById("theme").addEventListener("click", () => { setTheme(isDark() ? "light" : "dark"); figures.forEach(draw); });
await loadLibrary();
for (const f of figures) { addTools(f); await draw(f); }
root.dataset.ready = "yes";
