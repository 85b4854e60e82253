"use strict";
// What the reader does: choose settings, point at values, read them with the arrow keys.
(() => {
  const { draw, safe, swatch } = klrlChart;
  const tasks = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");

  // As klrl.base.digits.number: significant digits, large numbers in full; 0 digits for a count.
  const number = (v, digits) => digits === 0 || Math.abs(v) >= 10 ** digits - 0.5
    ? (Math.round(v) || 0).toLocaleString("en") : String(+v.toPrecision(digits));
  const estimate = (v, low, high, digits) => number(v, digits) +
    ((low ?? null) === null ? "" : ` (${number(low, digits)} to ${number(high, digits)})`);

  // Below five seeds there is no interval; the range of the seeds stands in its place.
  function ends(p, values) {
    if (p[2] !== null) return [p[2], p[3]];
    const known = values.filter((v) => v !== null);
    return known.length > 1 ? [Math.min(...known), Math.max(...known)] : [null, null];
  }

  function told(task, chart, [s, p]) {
    const count = p[4] === 1 ? "1 seed" : `${p[4]} seeds`, finished = task.seeds[s.i];
    const what = p[4] === 1 ? count : p[2] === null ? `range of ${count}` : `95 % interval over ${count}`;
    const seeds = what +
      (finished.includes("of") ? `; ${finished} finished` : "");
    const [ofX, ofY] = chart.digits;
    const j = s.points.indexOf(p), of = s.seeds.map((run) => run[j]);
    const across = s.places ? ends([0, 0, p[5] ?? null, p[6]], s.places) : [null, null];
    return `${task.settings[s.i]}\n${chart.x}: ${estimate(p[0], ...across, ofX)}\n` +
      `${chart.front ? "" : `${chart.title}, `}${chart.y}: ${estimate(p[1], ...ends(p, of), ofY)}\n${seeds}`;
  }

  function show(figure, chart, task, drawn, found, x, y) {
    const mark = figure.querySelector(".mark"), [, p] = found;
    tip.textContent = told(task, chart, found);
    tip.style.display = "block";
    tip.style.left = Math.max(4, Math.min(x + 14, document.documentElement.clientWidth - tip.offsetWidth - 4)) + "px";
    // Above the finger or the mouse where there is no room below.
    tip.style.top = (y + 18 + tip.offsetHeight < innerHeight ? y + 18 : Math.max(0, y - tip.offsetHeight - 12)) + "px";
    mark.setAttribute("cx", drawn.X(p[0]));
    mark.setAttribute("cy", drawn.Y(p[1]));
    mark.setAttribute("visibility", "visible");
  }

  function hide(figure) {
    tip.style.display = "none";
    figure.querySelector(".mark")?.setAttribute("visibility", "hidden");
  }

  function nearest(drawn, x, y) {
    let best = null, least = Infinity;
    for (const s of drawn.series) for (const p of s.points) {
      const distance = (drawn.X(p[0]) - x) ** 2 + (drawn.Y(p[1]) - y) ** 2;
      if (distance < least) { least = distance; best = [s, p]; }
    }
    return best;
  }

  function listen(figure, chart, task, drawn) {
    const svg = figure.querySelector("svg");
    const point = (event) => {
      const box = svg.getBoundingClientRect(), zoom = drawn.W / box.width;
      const found = nearest(drawn, (event.clientX - box.left) * zoom, (event.clientY - box.top) * zoom);
      show(figure, chart, task, drawn, found, event.clientX, event.clientY);
    };
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point); // a finger that taps does not move
    // What was tapped stays until something else is, or the page is scrolled.
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(figure); });
    svg.addEventListener("blur", () => hide(figure));
    let series = 0, place = -1;
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
      if (event.key === "Escape") hide(figure);
      if (!step) return;
      event.preventDefault();
      // A frontier's settings have one point each: every arrow goes to the next setting.
      series += chart.front ? step[0] + step[1] : step[0];
      if (chart.front && place < 0) series = 0;
      series = (series + drawn.series.length) % drawn.series.length;
      const s = drawn.series[series];
      place = chart.front ? 0 : Math.max(0, Math.min(place + step[1], s.points.length - 1));
      const box = svg.getBoundingClientRect(), p = s.points[place];
      show(figure, chart, task, drawn, [s, p], box.left + drawn.X(p[0]), box.top + drawn.Y(p[1]));
    });
  }

  function render(figure, chart, task, shown, key) {
    const plot = figure.querySelector(".plot");
    const W = Math.max(240, plot.clientWidth), H = Math.round(Math.max(250, Math.min(W * 0.6, 380)));
    const drawn = draw(chart, shown, task.failed, W, H, key);
    const missing = chart.series.filter((s) => shown.has(s.i) && chart.log && s.points.every((p) => p[1] <= 0));
    const names = missing.map((s) => task.settings[s.i]).join("; ");
    const note = missing.length ? `<p class="soft">Not above 0, so not drawn: ${safe(names)}</p>` : "";
    plot.innerHTML = drawn ? drawn.svg + note
      : `<p class="soft">${safe(chart.title)}: nothing to draw${shown.size ? "" : ", since no setting is chosen"}.</p>${note}`;
    if (drawn) listen(figure, chart, task, drawn);
  }

  addEventListener("scroll", () => {
    for (const figure of document.querySelectorAll("figure")) hide(figure);
  }, { passive: true });

  tasks.forEach((task, t) => {
    const section = document.getElementById(`task-${t}`), legend = section.querySelector(".legend");
    const figures = [...section.querySelectorAll("figure[data-chart]")];
    // What is drawn at first comes first: of a hundred boxes not all are in sight.
    const chosen = new Set(task.shown), order = [...task.settings.keys()].sort((a, b) => chosen.has(b) - chosen.has(a));
    legend.innerHTML = order.map((i) =>
      `<label><input type="checkbox" value="${i}"${chosen.has(i) ? " checked" : ""}>${swatch(i)}${safe(task.settings[i])}</label>`).join("");
    const boxes = [...legend.querySelectorAll("input")];
    const fold = section.querySelector("details.more");
    const redraw = () => {
      hide(section);
      const shown = new Set(boxes.filter((box) => box.checked).map((box) => +box.value));
      // What is folded away has no width yet.
      for (const figure of figures) if (fold.open || !fold.contains(figure)) render(figure, task.charts[+figure.dataset.chart], task, shown, `clip-${t}-${figure.dataset.chart}`);
    };
    legend.addEventListener("change", redraw);
    fold.addEventListener("toggle", redraw);
    for (const button of section.querySelectorAll("button[data-all]"))
      button.addEventListener("click", () => {
        for (const box of boxes) box.checked = button.dataset.all === "1";
        redraw();
      });
    redraw();
    let width = section.clientWidth;
    // In a frame of its own: what is drawn anew may change the section's size again.
    const resized = () => {
      if (section.clientWidth === width) return;
      width = section.clientWidth;
      redraw();
    };
    new ResizeObserver(() => requestAnimationFrame(resized)).observe(section);
  });
})();
