"use strict";
(() => {
  // Okabe and Ito's colours, told apart by colour-blind readers; their black is the ink of the page.
  const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "var(--ink)"];
  const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
  const W = 460, H = 290, LEFT = 62, RIGHT = 12, TOP = 26, BOTTOM = 42;
  const tasks = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");

  const colour = (i) => COLOURS[i % COLOURS.length];
  const dash = (i) => DASHES[Math.floor(i / COLOURS.length) % DASHES.length];
  const safe = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
  const short = (v) => {
    const size = Math.abs(v);
    if (size >= 1e6) return +(v / 1e6).toPrecision(3) + "M";
    if (size >= 1e4) return +(v / 1e3).toPrecision(3) + "k";
    return size && size < 1e-3 ? v.toExponential(0) : String(+v.toPrecision(3));
  };
  const exact = (v) => String(+v.toPrecision(5));

  function linearTicks(low, high) {
    const raw = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(raw));
    const step = unit * [1, 2, 5, 10].find((k) => k * unit >= raw);
    const ticks = [];
    for (let k = Math.ceil(low / step); k * step <= high + step * 1e-9; k++) ticks.push(k * step);
    return ticks;
  }

  function logTicks(low, high) {
    const ticks = [], decades = Math.log10(high / low);
    const every = decades < 2.5 ? [1, 2, 5] : [1], skip = Math.ceil(decades / 7);
    for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++)
      for (const k of every)
        if (e % skip === 0 && k * 10 ** e >= low * 0.999 && k * 10 ** e <= high * 1.001) ticks.push(k * 10 ** e);
    return ticks.length > 1 ? ticks : linearTicks(low, high);
  }

  function scale(low, high, from, to, log) {
    const f = log ? Math.log : (v) => v;
    return (v) => from + (to - from) * (f(v) - f(low)) / (f(high) - f(low));
  }

  function bounds(values, log, pad) {
    let low = Infinity, high = -Infinity;
    for (const v of values) { if (v < low) low = v; if (v > high) high = v; }
    if (log) return low === high ? [low / 2, high * 2] : [low, high];
    const room = low === high ? Math.abs(low) / 2 || 1 : (high - low) * pad;
    return [low - room, high + room];
  }

  // Points are [x, value, low, high, seeds], on a frontier also the interval of x: low, high.
  // Ends are null where one seed stands alone.
  function visible(chart, shown) {
    return chart.series
      .filter((s) => chart.front || shown.has(s.i))
      .map((s) => ({ i: s.i, points: s.points.filter((p) => !chart.log || p[1] > 0) }))
      .filter((s) => s.points.length);
  }

  function draw(figure, chart, task, shown) {
    const series = visible(chart, shown);
    const points = series.flatMap((s) => s.points);
    if (!points.length) {
      figure.querySelector(".plot").innerHTML = `<p class="soft">${safe(chart.title)}: nothing to draw</p>`;
      return;
    }
    const ends = points.flatMap((p) => (p[2] === null ? [p[1]] : [p[1], p[2], p[3]]));
    const [y0, y1] = bounds(chart.log ? ends.filter((v) => v > 0) : ends, chart.log, 0.05);
    const across = points.flatMap((p) => [p[0], p[5] ?? p[0], p[6] ?? p[0]]);
    const [x0, x1] = bounds(across, false, chart.front ? 0.08 : 0);
    const X = scale(x0, x1, LEFT, W - RIGHT, false);
    const Y = scale(y0, y1, H - BOTTOM, TOP, chart.log), clip = (v) => Y(chart.log ? Math.max(v, y0) : v);
    const out = [`<text x="${LEFT}" y="15" font-weight="600" font-size="12.5">${safe(chart.title)}</text>`];
    for (const t of chart.log ? logTicks(y0, y1) : linearTicks(y0, y1))
      out.push(`<line class="grid" x1="${LEFT}" x2="${W - RIGHT}" y1="${Y(t)}" y2="${Y(t)}"/>` +
        `<text x="${LEFT - 5}" y="${Y(t) + 4}" text-anchor="end">${short(t)}</text>`);
    for (const t of linearTicks(x0, x1))
      out.push(`<line class="grid" x1="${X(t)}" x2="${X(t)}" y1="${H - BOTTOM}" y2="${H - BOTTOM + 4}"/>` +
        `<text x="${X(t)}" y="${H - BOTTOM + 16}" text-anchor="middle">${short(t)}</text>`);
    out.push(`<text x="${(LEFT + W - RIGHT) / 2}" y="${H - 6}" text-anchor="middle">${safe(chart.x)}</text>`,
      `<text transform="translate(13 ${(TOP + H - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">` +
      `${safe(chart.y)}${chart.log ? " (log)" : ""}</text>`);
    if (chart.front) out.push(...drawPoints(series, chart.front, X, Y));
    else for (const s of series) out.push(...drawLine(s, X, Y, clip));
    out.push(`<circle class="mark" r="5" visibility="hidden"/>`);
    const label = `${chart.title}: ${chart.y} against ${chart.x}, ${series.length} settings`;
    figure.querySelector(".plot").innerHTML =
      `<svg viewBox="0 0 ${W} ${H}" role="img" aria-label="${safe(label)}">${out.join("")}</svg>`;
    hover(figure.querySelector("svg"), chart, series, task, X, Y);
  }

  function drawLine(s, X, Y, clip) {
    const at = (p, v) => `${X(p[0]).toFixed(1)},${v.toFixed(1)}`;
    const banded = s.points.filter((p) => p[2] !== null);
    const band = [...banded.map((p) => at(p, clip(p[3]))), ...banded.reverse().map((p) => at(p, clip(p[2])))];
    const line = s.points.map((p) => at(p, Y(p[1])));
    const mean = line.length > 1
      ? `<polyline class="mean" points="${line.join(" ")}" stroke="${colour(s.i)}" stroke-dasharray="${dash(s.i)}"/>`
      : `<circle cx="${X(s.points[0][0])}" cy="${Y(s.points[0][1])}" r="3" fill="${colour(s.i)}"/>`;
    return [`<polygon class="band" points="${band.join(" ")}" fill="${colour(s.i)}"/>`, mean];
  }

  function drawPoints(series, front, X, Y) {
    const of = new Map(series.map((s) => [s.i, s.points[0]]));
    const line = front.filter((i) => of.has(i)).map((i) => `${X(of.get(i)[0])},${Y(of.get(i)[1])}`);
    const out = [`<polyline class="front" points="${line.join(" ")}"/>`];
    for (const s of series) {
      const [x, y, low, high, , left, right] = s.points[0], stroke = `stroke="${colour(s.i)}" stroke-width="1.5"`;
      if (low !== null) out.push(`<line class="up" x1="${X(x)}" x2="${X(x)}" y1="${Y(low)}" y2="${Y(high)}" ${stroke}/>`);
      if (left !== null)
        out.push(`<line class="across" x1="${X(left)}" x2="${X(right)}" y1="${Y(y)}" y2="${Y(y)}" ${stroke}/>`);
      const fill = front.includes(s.i) ? colour(s.i) : "var(--card)";
      out.push(`<circle class="point" cx="${X(x)}" cy="${Y(y)}" r="4.5" fill="${fill}" stroke="${colour(s.i)}" stroke-width="1.8"/>`);
    }
    return out;
  }

  function hover(svg, chart, series, task, X, Y) {
    const mark = svg.querySelector(".mark");
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const px = (event.clientX - box.left) * W / box.width, py = (event.clientY - box.top) * H / box.height;
      let best = null, least = Infinity;
      for (const s of series) for (const p of s.points) {
        const distance = (X(p[0]) - px) ** 2 + (Y(p[1]) - py) ** 2;
        if (distance < least) { least = distance; best = [s, p]; }
      }
      const [s, p] = best;
      const interval = (low, high) => low === null || low === undefined ? "" : ` (${exact(low)} to ${exact(high)})`;
      const seeds = p[2] === null ? "1 seed, no interval" : `95 % intervals over ${p[4]} seeds`;
      tip.textContent = `${task.settings[s.i]}\n${chart.x}: ${exact(p[0])}${interval(p[5], p[6])}\n` +
        `${chart.y}: ${exact(p[1])}${interval(p[2], p[3])}\n${seeds}`;
      tip.style.display = "block";
      tip.style.left = Math.max(0, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
      tip.style.top = Math.max(0, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)) + "px";
      mark.setAttribute("cx", X(p[0])); mark.setAttribute("cy", Y(p[1])); mark.setAttribute("visibility", "visible");
    });
    svg.addEventListener("pointerleave", () => { tip.style.display = "none"; mark.setAttribute("visibility", "hidden"); });
  }

  tasks.forEach((task, t) => {
    const section = document.getElementById(`task-${t}`), legend = section.querySelector(".legend");
    const figures = [...section.querySelectorAll("figure[data-chart]")];
    legend.innerHTML = task.settings.map((name, i) =>
      `<label><input type="checkbox" value="${i}"${task.shown.includes(i) ? " checked" : ""}>` +
      `<svg viewBox="0 0 26 10"><line x1="0" x2="26" y1="5" y2="5" stroke="${colour(i)}" stroke-width="3" ` +
      `stroke-dasharray="${dash(i)}"/></svg>${safe(name)}</label>`).join("");
    const boxes = [...legend.querySelectorAll("input")];
    const redraw = () => {
      const shown = new Set(boxes.filter((box) => box.checked).map((box) => +box.value));
      for (const figure of figures) draw(figure, task.charts[+figure.dataset.chart], task, shown);
    };
    legend.addEventListener("change", redraw);
    for (const button of section.querySelectorAll("button[data-all]"))
      button.addEventListener("click", () => {
        for (const box of boxes) box.checked = button.dataset.all === "1";
        redraw();
      });
    redraw();
  });
})();
