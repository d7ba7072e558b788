// Helpers: making elements, writing numbers, unpacking data. Text from runs is only ever put into text nodes.

const SVG = 'http://www.w3.org/2000/svg';
const state = { data: null, smoothing: 0.6, hidden: new Set(), run: 0, logarithmic: false, axis: 'step', zoom: null, whole: new Set() };

// What was written stands in <pre>, in the direction of its script.
function el(tag, attributes, ...children) {
  return furnish(document.createElement(tag), tag === 'pre' ? { dir: 'auto', ...attributes } : attributes, children);
}

function svg(tag, attributes, ...children) {
  return furnish(document.createElementNS(SVG, tag), attributes, children);
}

function furnish(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === 'function') node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? '' : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(visible(String(child))));
  }
  return node;
}

// The first and the last of a text's characters, as people count them: no emoji is cut in half.
function shortened(text, first, last) {
  if (text.length <= first + last) return text;
  const ends = [text.slice(0, 8 * first), text.slice(-8 * last)].map((part) => (typeof Intl.Segmenter === 'undefined' ? [...part] : [...new Intl.Segmenter().segment(part)].map((one) => one.segment)));
  return ends[0].slice(0, first).join('') + ' … ' + ends[1].slice(-last).join('');
}

function replaceChildren(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
}

// Characters that reorder or hide text are shown as escapes, so that what is read is what was written.
const HIDING = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/gu;

function visible(text) {
  return text.replace(HIDING, (c) => '\\u{' + c.codePointAt(0).toString(16) + '}');
}

function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString('en-GB');
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, 'e');
  return size >= 1000 ? Math.round(value).toLocaleString('en-GB') : String(Number(value.toPrecision(4)));
}

function percent(share) {
  return (100 * share).toFixed(1) + '%';
}

// How values of a unit are written: shares as percentages, the rest as plain numbers.
function writer(unit) {
  return unit === 'share' ? (value) => (value === null || Number.isNaN(value) ? '–' : number(Number((100 * value).toPrecision(3))) + '%') : number;
}

function interval(triple) {
  return percent(triple[0]) + ' [' + (100 * triple[1]).toFixed(1) + ', ' + (100 * triple[2]).toFixed(1) + ']';
}

function clock(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const two = (n) => String(n).padStart(2, '0');
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return hours ? hours + ':' + two(minutes) + ':' + two(rest) : minutes + ':' + two(rest);
}

const STAGES = { base: 'base', warm_start: 'after warm start', final: 'after GRPO' };

function stageName(stage) {
  return STAGES[stage] || stage.replaceAll('_', ' ');
}

function runClass(index) {
  return 'run' + (index % 8);
}

// Packed data: base64 of zlib, in script blocks by id. Unpacked when asked for; the last few stay.
const unpacked = new Map();
const KEPT = 24;

function bytesOf(base64) {
  const letters = atob(base64);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

async function inflate(base64) {
  if (typeof DecompressionStream === 'undefined') {
    throw new Error('this browser cannot unpack the texts; a version from 2023 or later can');
  }
  const stream = new Blob([bytesOf(base64)]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function unpackBlock(id) {
  if (unpacked.has(id)) return unpacked.get(id);
  const made = inflate(document.getElementById(id).textContent).then((bytes) => JSON.parse(new TextDecoder().decode(bytes)));
  unpacked.set(id, made);
  if (unpacked.size > KEPT) unpacked.delete(unpacked.keys().next().value);
  return made;
}

const COLUMNS = ['step', 'problem', 'sample', 'tokens', 'group', 'reward', 'advantage', 'flags'];

// The columns of completions: five of int32, two of float32, one of bytes, one after the other.
function splitColumns(bytes, count) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const columns = {};
  let at = 0;
  for (const name of COLUMNS) {
    if (name === 'flags') {
      columns[name] = new Uint8Array(bytes.buffer, bytes.byteOffset + at, count);
      continue;
    }
    const real = name === 'reward' || name === 'advantage';
    const column = real ? new Float32Array(count) : new Int32Array(count);
    for (let i = 0; i < count; i++, at += 4) column[i] = real ? view.getFloat32(at, true) : view.getInt32(at, true);
    columns[name] = column;
  }
  return columns;
}

// Index of the last entry of an ascending list that is not above the value.
function lastNotAbove(ascending, value) {
  let low = 0, high = ascending.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (ascending[middle] <= value) low = middle; else high = middle - 1;
  }
  return low;
}

// Something that a link can name, and the mark to take the link from.
function anchor(id, title) {
  return el('a', { class: 'anchor', href: '#' + [id].flat().map(encodeURIComponent).join('/'), 'aria-label': 'Link to ' + title });
}

function slug(text) {
  return text.replace(/[^\p{L}\p{N}_.]+/gu, '-');
}

// The address now names what is looked at; going back still leads away from the page.
function remember(...parts) {
  history.replaceState(null, '', '#' + parts.map(encodeURIComponent).join('/'));
}

// A file of text made here, saved by the browser.
function save(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el('a', { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

// Spreadsheets take a text that begins with one of these signs for a formula, so it gets an apostrophe before it.
function csv(rows) {
  const cell = (value) => (typeof value === 'number' ? (Number.isFinite(value) ? String(value) : '') : '"' + value.replace(/^[=+\-@\t\r]/, "'$&").replaceAll('"', '""') + '"');
  return rows.map((row) => row.map(cell).join(',') + '\r\n').join('');
}

function section(id, title, note, ...children) {
  return el('section', { id, 'aria-labelledby': id + '-title' },
    el('h2', {}, el('span', { id: id + '-title' }, title), anchor(id, title)), note ? el('p', { class: 'note' }, note) : null, children);
}

function select(label, options, chosen, onChange) {
  const box = el('select', { change: (event) => onChange(event.target.value), 'aria-label': label },
    options.map(([value, text]) => el('option', { value, selected: String(value) === String(chosen) }, text)));
  return el('label', {}, label + ' ', box);
}

function runPicker(onChange) {
  if (state.data.runs.length < 2) return null;
  return select('Run', state.data.runs.map((run, i) => [i, run.name]), state.run, (value) => onChange(Number(value)));
}
