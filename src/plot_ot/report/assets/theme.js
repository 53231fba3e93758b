try { const kept = localStorage.getItem("plot-ot theme"); if (kept) document.documentElement.dataset.theme = kept; } catch { /* no storage */ }
