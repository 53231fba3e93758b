// What the page carries with it is packed (gzip in base64); every browser since 2023 can unpack it.

async function unpack(id) {
  const packed = document.getElementById(id);
  const text = atob(packed.textContent.trim());
  const bytes = new Uint8Array(text.length);
  for (let k = 0; k < text.length; k++) bytes[k] = text.charCodeAt(k);
  packed.remove();
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(unpacked).text();
}

function sayWhy(problem) {
  for (const plot of document.querySelectorAll("figure[data-chart] .plot")) {
    plot.classList.add("empty");
    plot.textContent = `The charts could not be drawn (${problem.message}); browsers from before 2023 cannot draw them. The tables hold the same numbers.`;
  }
  document.documentElement.dataset.ready = "without charts";
}
