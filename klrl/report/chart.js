"use strict";
// One chart as SVG, in the pixels of the screen. Everything here is a function of its arguments.
const klrlChart = (() => {
  const COLOURS = 7; // --c0 to --c6 of the style sheet
  const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
  const FONT = 12, GLYPH = 6.7, DIGIT = 7.7; // pixels: height, and about the widths of a letter and of a digit

  // Settings beyond the colours are told apart by dashes, and on a frontier by shapes.
  const colour = (i) => `var(--c${i % COLOURS})`;
  const lap = (i) => Math.floor(i / COLOURS) % DASHES.length;
  const dash = (i) => DASHES[lap(i)];
  const safe = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
  const px = (v) => +v.toFixed(1);

  function shape(i, x, y, r) {
    const at = (...pairs) => `<polygon points="${pairs.map(([a, b]) => `${px(x + a)},${px(y + b)}`).join(" ")}"`;
    const s = r * 0.9, t = r * 1.25;
    return [
      `<circle cx="${px(x)}" cy="${px(y)}" r="${r}"`,
      at([-s, -s], [s, -s], [s, s], [-s, s]),
      at([0, -t], [t, s], [-t, s]),
      at([0, -t], [t, 0], [0, t], [-t, 0]),
    ][lap(i)];
  }

  function linearTicks(low, high, count) {
    const raw = (high - low) / count, unit = 10 ** Math.floor(Math.log10(raw));
    const step = unit * [1, 2, 5, 10].find((k) => k * unit >= raw * 0.999);
    const ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(k * step);
    return named(ticks, step);
  }

  // As many digits as tell neighbours apart.
  function named(ticks, step) {
    const most = Math.max(...ticks.map(Math.abs));
    if (most < 1e-3 || most >= 1e9) {
      const digits = Math.max(0, Math.floor(Math.log10(most) + 1e-9) - Math.floor(Math.log10(step) + 1e-9));
      return ticks.map((t) => [t, t ? t.toExponential(digits).replace("e+", "e") : "0"]);
    }
    const [unit, letter] = most >= 1e6 ? [1e6, "M"] : most >= 1e4 ? [1e3, "k"] : [1, ""];
    const digits = Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9));
    return ticks.map((t) => [t, Math.abs(t) < step / 2 ? "0" : (t / unit).toFixed(digits) + letter]);
  }

  function logTicks(low, high, count) {
    const decades = Math.log10(high / low), every = decades < 2.5 ? [1, 2, 5] : [1];
    const skip = Math.max(1, Math.ceil(decades / count)), ticks = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++)
      for (const k of e % skip === 0 ? every : [])
        if (k * 10 ** e >= low * 0.999 && k * 10 ** e <= high * 1.001) ticks.push(k * 10 ** e);
    return ticks.length > 1 ? ticks.flatMap((t) => named([t], t)) : linearTicks(low, high, count);
  }

  function scale([low, high], from, to, log) {
    const f = log ? Math.log : (v) => v;
    return (v) => from + (to - from) * (f(v) - f(low)) / (f(high) - f(low));
  }

  function extent(values) {
    let low = Infinity, high = -Infinity;
    for (const v of values) { if (v < low) low = v; if (v > high) high = v; }
    return [low, high];
  }

  function yBounds(chart, points, seeds) {
    const ends = points.flatMap((p) => (p[2] === null ? [p[1]] : [p[1], p[2], p[3]])).concat(seeds);
    if (!chart.log) return padded(extent(ends), 0.05);
    let [low, high] = extent(ends.filter((v) => v > 0));
    if (chart.floor) low = Math.min(Math.max(low, chart.floor), high);
    if (low === high) return [low / 2, high * 2];
    const room = (high / low) ** 0.04;
    return [low / room, high * room];
  }

  function xBounds(chart, points, places) {
    const [low, high] = extent(points.flatMap((p) => [p[0], p[5] ?? p[0], p[6] ?? p[0]]).concat(places));
    if (!chart.front) return low >= 0 && low < high / 4 ? [0, high] : low === high ? padded([low, high], 0) : [low, high];
    const [left, right] = padded([low, high], 0.08);
    return [low >= 0 && left < 0 ? Math.min(0, low - (right - low) * 0.03) : left, right];
  }

  function padded([low, high], share) {
    const room = low === high ? Math.abs(low) / 2 || 1 : (high - low) * share;
    return [low - room, high + room];
  }

  // Points are [x, mean, low, high, seeds], against KL also the interval of x: low, high; ends are null
  // where there is no interval. seeds: a list for each run, one value for each point; places: of return
  // against KL, x of each run. null where a run has no value.
  function visible(chart, shown) {
    return chart.series
      .filter((s) => chart.front || shown.has(s.i))
      .map((s) => {
        const kept = s.points.map((p) => !chart.log || p[1] > 0), here = (list) => list.filter((_, k) => kept[k]);
        return { ...s, points: here(s.points), seeds: s.seeds.map((run) => here(run).map((v) => (chart.log && !(v > 0) ? null : v))) };
      });
  }

  // Returns the SVG's text, what is drawn and where; null where nothing is.
  function draw(chart, shown, failed, W, H, key) {
    const series = visible(chart, shown).filter((s) => s.points.length);
    const points = series.flatMap((s) => s.points);
    if (!points.length) return null;
    const recorded = (lists) => lists.flat().filter((v) => v !== null);
    const lines = chart.front || chart.result ? series.flatMap((s) => s.seeds) : series.flatMap((s) => s.seeds.map((run) => run.slice(-1)));
    const ys = yBounds(chart, points, recorded(lines));
    const xs = xBounds(chart, points, recorded(series.map((s) => s.places ?? [])));
    const rows = Math.max(2, Math.floor(H / 48));
    const yTicks = chart.log ? logTicks(...ys, rows) : linearTicks(...ys, rows);
    const left = 28 + DIGIT * Math.max(...yTicks.map(([, name]) => name.length));
    const xTicks = linearTicks(...xs, Math.max(2, Math.floor((W - left) / 70)))
      .filter(([t]) => !chart.front || t >= 0 || xs[0] < -xs[1] / 9);
    const right = 6 + DIGIT * Math.max(1, ...xTicks.map(([, name]) => name.length)) / 2, top = 30, bottom = 44;
    const X = scale(xs, left, W - right, false), Y = scale(ys, H - bottom, top, chart.log);
    const out = [
      `<clipPath id="${key}"><rect x="${left}" y="${top - 4}" width="${W - right - left + 4}" height="${H - bottom - top + 8}"/></clipPath>`,
      `<text x="${left}" y="17" font-weight="600" font-size="${fitting(chart.title, W - left, 13)}">${safe(chart.title)}</text>`,
      ...yTicks.map(([t, name]) => `<line class="grid" x1="${left}" x2="${W - right}" y1="${px(Y(t))}" y2="${px(Y(t))}"/>` +
        `<text x="${left - 6}" y="${px(Y(t) + 4)}" text-anchor="end">${name}</text>`),
      ...xTicks.map(([t, name]) => `<line class="grid" x1="${px(X(t))}" x2="${px(X(t))}" y1="${H - bottom}" y2="${H - bottom + 4}"/>` +
        `<text class="x" x="${px(X(t))}" y="${H - bottom + 17}" text-anchor="middle">${name}</text>`),
      label(chart.x, (left + W - right) / 2, H - 7, W - left - right, ""),
      label(chart.y + (chart.log ? " (log)" : ""), 0, 0, H - top - bottom + 30,
        `transform="translate(15 ${(top + H - bottom) / 2}) rotate(-90)"`),
      `<g clip-path="url(#${key})">`,
      ...(chart.front ? against(series, chart.front, shown, failed, X, Y)
        : [...series.flatMap((s) => (chart.result ? thin : lastOnes)(s, failed[s.i], X, Y)), ...series.flatMap((s) => line(s, X, Y, ys[0], chart.log))]),
      `<circle class="mark" r="6" visibility="hidden"/></g>`,
    ];
    const told = `${chart.title}: ${chart.y} against ${chart.x}, ${series.length} settings. Arrow keys read the values.`;
    const svg = `<svg width="${W}" height="${H}" viewBox="0 0 ${W} ${H}" role="img" tabindex="0" aria-label="${safe(told)}">${out.join("")}</svg>`;
    return { svg, series, X, Y, W };
  }

  // Smaller where it would not fit; bold letters are wider.
  const fitting = (text, room, size) => px(Math.max(9, Math.min(size, size * room / (text.length * GLYPH * (size / FONT) ** 2))));

  function label(text, x, y, room, more) {
    const size = fitting(text, room, FONT);
    return `<text class="label" x="${px(x)}" y="${y}" ${more} text-anchor="middle" font-size="${size}">${safe(text)}</text>`;
  }

  function line(s, X, Y, least, log) {
    const at = (p, v) => `${px(X(p[0]))},${px(Y(log ? Math.max(v, least / 2) : v))}`;
    const banded = s.points.filter((p) => p[2] !== null), first = s.points[0];
    const band = [...banded.map((p) => at(p, p[3])), ...banded.reverse().map((p) => at(p, p[2]))];
    const mean = s.points.map((p) => at(p, p[1]));
    return [
      band.length > 2 ? `<polygon class="band" points="${band.join(" ")}" fill="${colour(s.i)}"/>` : "",
      mean.length > 1
        ? `<polyline class="mean" points="${mean.join(" ")}" stroke="${colour(s.i)}" stroke-dasharray="${dash(s.i)}"/>`
        : `<circle class="mean only" cx="${px(X(first[0]))}" cy="${px(Y(first[1]))}" r="3.5" fill="${colour(s.i)}"/>`,
    ];
  }

  const cross = (x, y, r) => `<path class="failed" d="M${px(x - r)} ${px(y - r)}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}"`;

  // The runs of a setting, a thin line each; a cross where one failed, and broken from there on.
  function thin(s, failed, X, Y) {
    const ink = `stroke="${colour(s.i)}"`;
    const path = (at, kind) => `<polyline class="${kind}" points="${at.map(([u, v]) => `${px(X(u))},${px(Y(v))}`).join(" ")}" ${ink}/>`;
    return s.seeds.flatMap((run, k) => {
      const at = s.points.map((p, j) => [p[0], run[j]]).filter(([, v]) => v !== null);
      if (!at.length) return [];
      const live = failed[k] === null ? at.length : at.findIndex(([x]) => x >= failed[k]) + 1 || at.length;
      const [x, y] = at[live - 1];
      const end = failed[k] === null ? "" : `${cross(X(x), Y(y), 3)} ${ink}/>` + (live < at.length ? path(at.slice(live - 1), "seed after") : "");
      return live > 1 ? [path(at.slice(0, live), "seed") + end]
        : [end || `<circle class="seed" cx="${px(X(x))}" cy="${px(Y(y))}" r="2" fill="${colour(s.i)}"/>`];
    });
  }

  // The last value of each run, where its line would say no more.
  const lastOnes = (s, failed, X, Y) => s.seeds.map((run, k) => {
    const j = run.findLastIndex((v) => v !== null);
    if (j < 0) return "";
    const [x, y] = [X(s.points[j][0]), Y(run[j])];
    return failed[k] !== null ? `${cross(x, y, 3)} stroke="${colour(s.i)}"/>` : `${shape(s.i, x, y, 2)} class="dot" fill="${colour(s.i)}"/>`;
  });

  const seedMarks = (s, failed, X, Y) => s.seeds.map(([y], k) => (y === null || s.places[k] === null ? ""
    : failed[k] !== null ? `${cross(X(s.places[k]), Y(y), 3)}/>`
    : `${shape(s.i, X(s.places[k]), Y(y), 2)} class="dot" stroke="none" fill="${colour(s.i)}"/>`)).join("");

  // Settings whose box is empty are faint: the front is that of all.
  function against(series, front, shown, failed, X, Y) {
    const of = new Map(series.map((s) => [s.i, s.points[0]]));
    const joined = front.filter((i) => of.has(i)).map((i) => `${px(X(of.get(i)[0]))},${px(Y(of.get(i)[1]))}`);
    const bar = (kind, x1, x2, y1, y2) => `<line class="${kind}" x1="${px(x1)}" x2="${px(x2)}" y1="${px(y1)}" y2="${px(y2)}"/>`;
    return [`<polyline class="front" points="${joined.join(" ")}"/>`, ...series.map((s) => {
      const [x, y, low, high, , from, to] = s.points[0];
      const fill = front.includes(s.i) ? colour(s.i) : "var(--card)";
      return `<g class="setting${shown.has(s.i) ? "" : " faint"}" stroke="${colour(s.i)}" stroke-width="1.7">` +
        seedMarks(s, failed[s.i], X, Y) +
        (low === null ? "" : bar("up", X(x), X(x), Y(low), Y(high))) +
        ((from ?? null) === null ? "" : bar("across", X(from), X(to), Y(y), Y(y))) +
        `${shape(s.i, X(x), Y(y), 5)} class="point" fill="${fill}"/></g>`;
    })];
  }

  const swatch = (i) => `<svg viewBox="0 0 30 12" aria-hidden="true"><line x1="0" x2="30" y1="6" y2="6" stroke="${colour(i)}" ` +
    `stroke-width="2.5" stroke-dasharray="${dash(i)}"/>${shape(i, 15, 6, 4)} fill="${colour(i)}"/></svg>`;

  return { draw, safe, swatch };
})();
