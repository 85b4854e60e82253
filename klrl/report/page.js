"use strict";
// Lets the reader choose settings, point at values, and read them with the arrow keys.
const charts = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");

function choose(section) {
  for (const box of section.querySelectorAll("input"))
    for (const mark of section.querySelectorAll(`[data-s="${box.value}"]`)) mark.classList.toggle("off", !box.checked);
}

for (const section of document.querySelectorAll("section[id^=task-]")) {
  section.addEventListener("change", () => choose(section));
  for (const button of section.querySelectorAll("button"))
    button.addEventListener("click", () => {
      for (const box of section.querySelectorAll("input")) box.checked = Boolean(button.dataset.all);
      choose(section);
    });
  choose(section);
}

// A point is [x in the chart, y in the chart, text of x, text of y and seeds].
function show(figure, series, point, x, y) {
  const chart = charts[figure.dataset.chart], mark = figure.querySelector(".mark");
  tip.textContent = `${series.name}\n${chart.x}${point[2]}\n${chart.y}${point[3]}`;
  tip.style.display = "block";
  tip.style.left = Math.max(4, Math.min(x + 14, document.documentElement.clientWidth - tip.offsetWidth - 4)) + "px";
  // Place the text above the pointer if there is no room below.
  tip.style.top = (y + 18 + tip.offsetHeight < innerHeight ? y + 18 : Math.max(0, y - tip.offsetHeight - 12)) + "px";
  mark.setAttribute("cx", point[0]);
  mark.setAttribute("cy", point[1]);
  mark.setAttribute("visibility", "visible");
}

function hide() {
  tip.style.display = "none";
  for (const mark of document.querySelectorAll(".mark")) mark.setAttribute("visibility", "hidden");
}

function listen(figure) {
  const svg = figure.querySelector("svg"), every = charts[figure.dataset.chart].series;
  // Charts against KL draw all settings; curves draw only the checked settings.
  const drawn = () => every.filter((s) => !figure.matches(".curves") || svg.querySelector(`[data-s="${s.i}"]:not(.off)`));
  const zoom = () => svg.viewBox.baseVal.width / svg.getBoundingClientRect().width;
  const nearest = (event) => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) * zoom(), y = (event.clientY - box.top) * zoom();
    const points = drawn().flatMap((s) => s.points.map((p) => [(p[0] - x) ** 2 + (p[1] - y) ** 2, s, p]));
    if (!points.length) return;
    const [, series, point] = points.reduce((a, b) => (b[0] < a[0] ? b : a));
    show(figure, series, point, event.clientX, event.clientY);
  };
  svg.addEventListener("pointermove", nearest);
  svg.addEventListener("pointerdown", nearest); // a tap sends no pointermove
  // After a tap, the value stays until the next tap or scroll.
  svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
  svg.addEventListener("blur", hide);
  let row = 0, place = -1;
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (event.key === "Escape") hide();
    const here = drawn();
    if (!step || !here.length) return;
    event.preventDefault();
    // If every setting has a single point, each arrow goes to the next setting.
    const single = here.every((s) => s.points.length === 1), first = place < 0;
    row = (row + step[0] + (single && !first ? step[1] : 0) + here.length) % here.length;
    if (single && first) row = 0;
    const points = here[row].points;
    place = Math.max(0, Math.min(place + (single && !first ? 0 : step[1]), points.length - 1));
    const box = svg.getBoundingClientRect(), point = points[place];
    show(figure, here[row], point, box.left + point[0] / zoom(), box.top + point[1] / zoom());
  });
}

addEventListener("scroll", hide, { passive: true });
document.querySelectorAll("figure[data-chart]").forEach(listen);
