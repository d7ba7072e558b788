// One chart: lines or a fan of quantiles over steps, time or tokens, with a cursor that tells the numbers, zoom and export.

const WIDTH = 400, HEIGHT = 190, PAD_LEFT = 52, PAD_RIGHT = 14, TOP = 8, BOTTOM = 26;

// Exponential smoothing without the bias of a start at 0, as if the curve had always been there.
function smooth(values, weight) {
  if (!weight) return values;
  let running = 0, share = 0;
  return values.map((value) => {
    running = weight * running + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return running / share;
  });
}

// Round numbers that cover a range: about `count` of them, and at least three.
function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0) || !Number.isFinite(span)) return [low];
  for (let finer = count; finer < 3 * count; finer++) {
    const found = roundNumbers(low, high, finer);
    if (found.length > 2) return found;
  }
  return roundNumbers(low, high, 3 * count);
}

function roundNumbers(low, high, count) {
  const span = high - low;
  const rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && found.length < 50; i++) found.push(i * step);
  return found;
}

function extent(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) {
    for (const value of list) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low <= high ? [low, high] : [0, 1];
}

// Every one of the values is above 0, so that a logarithm can be taken.
function positive(lists) {
  return lists.every((list) => list.every((value) => value > 0));
}

// The range that shows how a line goes. Values further off than the whole range of all but the largest and smallest 1% (at least one
// at each end) are spikes: they would flatten the rest.
function withoutSpikes(values) {
  const sorted = Float64Array.from(values).sort(), cut = Math.max(1, Math.ceil(sorted.length / 100));
  const low = sorted[cut], high = sorted[sorted.length - 1 - cut], span = high - low;
  if (sorted.length < 20 || !(span > 0)) return extent([sorted]);
  return extent([sorted.filter((v) => v >= low - span && v <= high + span)]);
}

// A spike that is left outside does not move the smoothed curve either.
function clamped(values) {
  const [low, high] = withoutSpikes(values);
  return values.map((value) => Math.max(low, Math.min(high, value)));
}

// The values whose places are in the range, with the neighbour at either side.
function inView(at, values, range) {
  return values.slice(lastNotAbove(at, range[0]), lastNotAbove(at, range[1]) + 2);
}

// `lists`: [places, values] each; with `robust`, spikes may be left outside.
function makeScales(lists, robust) {
  const wide = [stepRange(), ...lists.map(([at]) => at)];
  const [first, last] = state.zoom || extent(wide);
  const shown = lists.map(([at, values]) => inView(at, values, [first, last]));
  const log = state.logarithmic && positive(lists.map(([, values]) => values));
  let [low, high] = extent(robust && !log ? shown.map(withoutSpikes) : shown);
  const of = log ? Math.log10 : (v) => v;
  if (high - low < 1e-12 * Math.max(1, Math.abs(high))) {
    const pad = Math.abs(high) * 0.1;
    [low, high] = log ? [low / 2, high * 2] : pad ? [low - pad, high + pad] : [0, 1];
  }
  const margin = (of(high) - of(low)) * 0.04;
  const [bottom, top] = [of(low) - margin, of(high) + margin];
  const span = last - first || 1, axis = axisShown();
  return {
    first, last, low, high, axis, robust: robust && !log,
    x: (at) => PAD_LEFT + ((at - first) / span) * (WIDTH - PAD_LEFT - PAD_RIGHT),
    y: (value) => TOP + ((top - of(value)) / (top - bottom)) * (HEIGHT - TOP - BOTTOM),
    at: (x) => first + ((x - PAD_LEFT) / (WIDTH - PAD_LEFT - PAD_RIGHT)) * span,
    valueTicks: log ? ticks(bottom, top, 4).map((t) => 10 ** t) : ticks(bottom, top, 4),
    ticks: ticks(first, last, 5).filter((t) => state.axis !== 'step' || Number.isInteger(t)),
  };
}

function axes(scales, write) {
  const grid = scales.valueTicks.map((value) => [
    svg('line', { class: 'grid', x1: PAD_LEFT, x2: WIDTH - PAD_RIGHT, y1: scales.y(value), y2: scales.y(value) }),
    svg('text', { class: 'tick', x: PAD_LEFT - 5, y: scales.y(value) + 3.5, 'text-anchor': 'end' }, write(value)),
  ]);
  const places = scales.ticks.map((at) =>
    svg('text', { class: 'tick', x: scales.x(at), y: HEIGHT - 8, 'text-anchor': 'middle' }, number(at) + scales.axis.unit));
  const name = svg('text', { class: 'tick', x: 2, y: HEIGHT - 8 }, scales.axis.name);
  return svg('g', {}, grid, name, places);
}

function path(scales, at, values) {
  return at.map((place, i) => (i ? 'L' : 'M') + scales.x(place).toFixed(1) + ' ' + scales.y(values[i]).toFixed(1)).join('');
}

function area(scales, at, low, high) {
  const back = path(scales, [...at].reverse(), [...low].reverse());
  return path(scales, at, high) + 'L' + back.slice(1) + 'Z';
}

function nearest(steps, wanted) {
  if (!steps.length) return -1;
  const below = lastNotAbove(steps, wanted);
  const above = Math.min(below + 1, steps.length - 1);
  return Math.abs(steps[above] - wanted) < Math.abs(steps[below] - wanted) ? above : below;
}

// The unit is left out where the title says it already, and where the numbers do: shares are written as percentages.
function withUnit(title, unit) {
  return !unit || unit === '1' || unit === 'share' || title.toLowerCase().includes(unit.toLowerCase()) ? title : title + ', ' + unit;
}

// All charts show one range; null is the whole. Drawn in place, so that the chart that was dragged over stays under the pointer.
function zoomTo(range) {
  state.zoom = range;
  document.getElementById('zoom-from').value = range ? number(range[0]).replaceAll(',', '') : '';
  document.getElementById('zoom-to').value = range ? number(range[1]).replaceAll(',', '') : '';
  redrawCharts();
}

function redrawCharts() {
  for (const place of document.querySelectorAll('.place:has(.chart)')) {
    const focused = place.contains(document.activeElement) ? document.activeElement.dataset.part : null;
    place.dispatchEvent(new Event('draw'));
    if (focused) place.querySelector('[data-part="' + focused + '"]')?.focus();
  }
}

// The drawing as a file of its own: what the page's style says is written into every element, and the title above.
function saveDrawing(id, title, drawing) {
  const copy = drawing.cloneNode(true), ground = getComputedStyle(drawing.closest('figure')), above = 22;
  const parts = [...drawing.querySelectorAll('*')];
  [...copy.querySelectorAll('*')].forEach((part, i) => {
    const style = getComputedStyle(parts[i]);
    for (const name of ['fill', 'stroke', 'stroke-width', 'stroke-dasharray', 'opacity', 'font-size', 'font-family']) part.setAttribute(name, style.getPropertyValue(name));
    part.removeAttribute('class');
  });
  copy.prepend(svg('rect', { x: 0, y: -above, width: WIDTH, height: HEIGHT + above, fill: ground.backgroundColor }),
    svg('text', { x: 4, y: -6, fill: ground.color, 'font-size': 13, 'font-family': ground.fontFamily }, title));
  for (const [name, value] of Object.entries({ xmlns: SVG, viewBox: [0, -above, WIDTH, HEIGHT + above].join(' '), width: 2 * WIDTH, height: 2 * (HEIGHT + above) })) copy.setAttribute(name, value);
  save(id + '.svg', 'image/svg+xml', new XMLSerializer().serializeToString(copy));
}

// A chart's frame, axes, cursor and tools. `marks` are drawn inside; `at` are the places where the cursor stops, `tell(at)` gives the
// readout's pieces, `rows()` the numbers as a table, and `beyond` a note on what lies outside.
function frame({ id, title, unit, about, scales, marks, edge, at, tell, rows, beyond }) {
  const cursor = svg('line', { class: 'cursor', y1: TOP, y2: HEIGHT - BOTTOM, visibility: 'hidden' });
  const chosen = svg('rect', { class: 'chosen', y: TOP, height: HEIGHT - TOP - BOTTOM, visibility: 'hidden' });
  const readout = el('div', { class: 'readout', 'aria-live': 'polite' });
  let here = null, from = null;
  const move = (place) => {
    here = place;
    cursor.setAttribute('x1', scales.x(place));
    cursor.setAttribute('x2', scales.x(place));
    cursor.setAttribute('visibility', 'visible');
    replaceChildren(readout, tell(place));
  };
  const rest = () => {
    cursor.setAttribute('visibility', 'hidden');
    replaceChildren(readout, tell(scales.last));
  };
  const placeOf = (event) => {
    const box = drawing.getBoundingClientRect();
    return Math.max(scales.first, Math.min(scales.last, scales.at(((event.clientX - box.left) / box.width) * WIDTH)));
  };
  const seen = at.filter((place) => place >= scales.first && place <= scales.last);
  const point = (event) => {
    const wanted = placeOf(event), i = nearest(seen, wanted);
    if (i >= 0) move(seen[i]);
    if (from === null) return;
    const [left, right] = [scales.x(from), scales.x(wanted)].sort((a, b) => a - b);
    chosen.setAttribute('x', left);
    chosen.setAttribute('width', right - left);
    chosen.setAttribute('visibility', 'visible');
  };
  const press = (event) => {
    point(event);
    if (event.pointerType === 'touch' || event.button) return;  // a finger reads and scrolls
    from = placeOf(event);
    drawing.setPointerCapture(event.pointerId);
  };
  const release = (event) => {
    const range = from === null ? null : [from, placeOf(event)].sort((a, b) => a - b);
    from = null;
    chosen.setAttribute('visibility', 'hidden');
    if (range && scales.x(range[1]) - scales.x(range[0]) > 8) zoomTo(range);
  };
  const key = (event) => {
    if (event.key === 'Escape' && state.zoom) zoomTo(null);
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!way || !seen.length) return;
    event.preventDefault();
    const i = here === null ? seen.length - 1 : nearest(seen, here) + way;
    move(seen[Math.max(0, Math.min(seen.length - 1, i))]);
  };
  const box = { x: PAD_LEFT, y: TOP, width: WIDTH - PAD_LEFT - PAD_RIGHT, height: HEIGHT - TOP - BOTTOM };
  const drawing = svg('svg', {
    viewBox: '0 0 ' + WIDTH + ' ' + HEIGHT, tabindex: 0, role: 'img', 'aria-label': title + ' over ' + { step: 'steps', time: 'time', tokens: 'tokens' }[state.axis], 'data-part': 'drawing',
    pointermove: point, pointerdown: press, pointerup: release, pointercancel: release, pointerleave: rest, keydown: key, blur: rest, dblclick: () => state.zoom && zoomTo(null),
  }, axes(scales, writer(unit)), svg('svg', { ...box, viewBox: Object.values(box).join(' '), class: state.zoom || beyond ? 'cut' : 'whole' }, marks), edge, cursor, chosen);
  rest();
  const tool = (part, name, what, click) => el('button', { type: 'button', 'data-part': part, 'aria-label': what + ' of ' + title, click }, name);
  return el('figure', { class: 'chart' },
    el('figcaption', {}, withUnit(title, unit), el('span', { class: 'tools' }, anchor(id, title), tool('csv', 'CSV', 'Numbers', () => save(id + '.csv', 'text/csv', csv(rows()))), tool('svg', 'SVG', 'Drawing', () => saveDrawing(id, title, drawing))),
      about ? el('small', { class: 'about', title: about }, about) : null), drawing, beyond, readout);
}

// Small triangles at the edge, one for each value that lies outside, and a button that shows all or leaves them outside again.
function spikes(id, scales, lines, write) {
  const marks = [];
  let count = 0, furthest = 0;
  for (const line of lines) {
    line.at.forEach((at, i) => {
      if (at < scales.first || at > scales.last) return;
      for (const value of line.low ? [line.low[i], line.high[i]] : [line.values[i]]) {
        const above = value > scales.high;
        if (!above && value >= scales.low) continue;
        count += 1;
        furthest = Math.abs(value) > Math.abs(furthest) ? value : furthest;
        const [x, y, tip] = [scales.x(at), above ? TOP + 7 : HEIGHT - BOTTOM - 7, above ? TOP : HEIGHT - BOTTOM];
        marks.push(svg('path', { class: 'beyond ' + line.look, d: 'M' + (x - 4) + ' ' + y + 'L' + (x + 4) + ' ' + y + 'L' + x + ' ' + tip + 'Z' }));
      }
    });
  }
  const whole = state.whole.has(id);
  if (!count && !whole) return [null, null];
  const toggle = () => { if (whole) state.whole.delete(id); else state.whole.add(id); redrawCharts(); };
  return [marks, el('p', { class: 'note' }, whole ? null : number(count) + (count > 1 ? ' values lie' : ' value lies') + ' outside (' + write(furthest) + '). ',
    el('button', { type: 'button', 'data-part': 'all', click: toggle }, whole ? 'leave spikes outside' : 'show all'))];
}

// `lines`: [{label, look, taken, steps, values, low?, high?}]; `look` is a class that gives the colour, `taken` the run's seconds and tokens.
function lineChart(id, title, unit, about, lines_) {
  const write = writer(unit), lines = lines_.map((line) => ({ ...line, at: places(line.taken, line.steps) }));
  const robust = unit !== 'share' && !state.whole.has(id);
  const scales = makeScales(lines.flatMap((line) => (line.low ? [[line.at, line.low], [line.at, line.high]] : [[line.at, line.values]])), robust);
  const smoothed = lines.map((line) => (line.judged ? line.values : smooth(scales.robust ? clamped(line.values) : line.values, state.smoothing)));
  const [edge, beyond] = spikes(id, scales, lines, write);
  const marks = lines.map((line, i) => svg('g', { class: line.look },
    line.low ? svg('path', { class: 'band', d: area(scales, line.at, line.low, line.high) }) : null,
    state.smoothing && !line.judged ? svg('path', { class: 'raw', d: path(scales, line.at, line.values) }) : null,
    line.steps.length === 1 || line.judged ? line.at.map((at, j) => svg('circle', { class: 'dot', cx: scales.x(at), cy: scales.y(line.values[j]), r: 3 })) : null,
    svg('path', { class: 'line', d: path(scales, line.at, smoothed[i]) })));
  const at = [...new Set(lines.flatMap((line) => line.at))].sort((a, b) => a - b);
  const tell = (place) => [
    el('span', { class: 'step' }, told(place, lines.length === 1 ? lines[0].steps[nearest(lines[0].at, place)] : null)),
    ...lines.map((line, i) => {
      const near = nearest(line.at, place);
      const smoothing = line.judged ? ' [' + [line.low[near], line.high[near]].map((v) => (100 * v).toFixed(1)).join(', ') + ']' : state.smoothing ? ' (' + write(smoothed[i][near]) + ')' : '';
      const outside = place < line.at[0] || place > line.at[line.at.length - 1];
      const elsewhere = outside || (state.axis !== 'step' && lines.length > 1) ? ' at step ' + number(line.steps[near]) : '';  // a shorter run is not where the pointer is
      return el('span', { class: line.look }, el('i', { class: 'swatch' }), (lines.length > 1 ? line.label + ' ' : '') + write(line.values[near]) + smoothing + elsewhere);
    }),
  ];
  const rows = () => [['line', 'step', 'seconds', 'tokens', 'value', 'low', 'high'], ...lines.flatMap((line) => line.steps.map((step, i) => [
    line.label, step, ...taken(line.taken, step), line.values[i], ...(line.low ? [line.low[i], line.high[i]] : ['', ''])]))];
  return frame({ id, title, unit, about, scales, marks, edge, at, tell, rows, beyond });
}

// A distribution over steps: lightest from min to max, darker from 10% to 90% and 25% to 75%, the median as a line.
function fanChart(id, title, unit, about, run, band, quantiles, look) {
  const rows = band.quantiles, middle = (rows.length - 1) / 2, at = places(run.taken, band.steps);
  const scales = makeScales(rows.map((row) => [at, row]), false);
  const layers = [];
  for (let i = 0; i < middle; i++) {
    layers.push(svg('path', { class: 'fan', d: area(scales, at, rows[i], rows[rows.length - 1 - i]) }));
  }
  const marks = svg('g', { class: look }, layers, svg('path', { class: 'line', d: path(scales, at, rows[middle]) }));
  const names = quantiles.map((q) => (q === 0 ? 'min' : q === 1 ? 'max' : q === 0.5 ? 'median' : Math.round(100 * q) + '%'));
  const tell = (place) => {
    const i = nearest(at, place);
    return [el('span', { class: 'step' }, told(at[i], band.steps[i])), ...rows.map((row, q) => el('span', {}, names[q] + ' ' + number(row[i])))];
  };
  const table_ = () => [['line', 'step', 'seconds', 'tokens', ...names], ...band.steps.map((step, i) => [run.name, step, ...taken(run.taken, step), ...rows.map((row) => row[i])])];
  return frame({ id, title, unit, about, scales, marks, at, tell, rows: table_ });
}

// What charts run along: steps, or what a run had taken by then, in a unit that suits the longest run.
const UNITS = { time: [[3600, ' h'], [60, ' min'], [1, ' s']], tokens: [[1e9, 'G'], [1e6, 'M'], [1e3, 'k'], [1, '']] };

function axisShown() {
  if (state.axis === 'step') return { name: 'step', size: 1, unit: '' };
  const most = Math.max(...state.data.runs.map((run) => run.taken[state.axis]?.at(-1) || 0));
  const [size, unit] = UNITS[state.axis].find(([size]) => most >= 2 * size) || UNITS[state.axis].at(-1);
  return { name: state.axis, size, unit };
}

// Only what every run has recorded can be the axis of all charts.
function axesOffered() {
  const known = (name) => state.data.runs.every((run) => !run.steps || run.taken[name]);
  return [['step', 'step'], ['time', 'time'], ['tokens', 'completion tokens']].filter(([name]) => name === 'step' || known(name));
}

function along(xs, ys, x) {
  const i = Math.max(0, Math.min(lastNotAbove(xs, x), xs.length - 2));
  return xs.length < 2 ? ys[0] : ys[i] + ((ys[i + 1] - ys[i]) * (x - xs[i])) / (xs[i + 1] - xs[i]);
}

// What a run without steps has stands at the beginning.
function places(taken_, steps) {
  const { size } = axisShown(), known = taken_[state.axis];
  return state.axis === 'step' ? steps : steps.map((step) => (known ? along(taken_.steps, known, step) / size : 0));
}

// Seconds and tokens by the end of a step, as a table has them.
function taken(taken_, step) {
  return ['time', 'tokens'].map((name) => (taken_[name] ? Number(along(taken_.steps, taken_[name], step).toPrecision(6)) : ''));
}

function told(place, step) {
  if (state.axis === 'step') return 'step ' + number(place);
  const { unit } = axisShown();
  return (step === null ? '' : 'step ' + number(step) + ', ') + number(Number(place.toPrecision(4))) + unit + (state.axis === 'tokens' ? ' tokens' : '');
}
