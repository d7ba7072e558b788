// What changed between two texts, word by word.

const LONGEST_DIFF = 4000;

function wordsOf(text) {
  return text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || [];
}

// [[kind, text]...] with kind '=', '-' (only before) or '+' (only after): a longest common subsequence of words.
function difference(before, after) {
  const a = wordsOf(before), b = wordsOf(after);
  let start = 0, endA = a.length, endB = b.length;
  while (start < endA && start < endB && a[start] === b[start]) start++;
  while (endA > start && endB > start && a[endA - 1] === b[endB - 1]) { endA--; endB--; }
  const middle = (endA - start) * (endB - start) > LONGEST_DIFF * LONGEST_DIFF / 4
    ? [['-', a.slice(start, endA).join('')], ['+', b.slice(start, endB).join('')]]
    : between(a.slice(start, endA), b.slice(start, endB));
  return merged([['=', a.slice(0, start).join('')], ...middle, ['=', a.slice(endA).join('')]]);
}

function between(a, b) {
  const width = b.length + 1;
  const best = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      best[i * width + j] = a[i] === b[j] ? best[(i + 1) * width + j + 1] + 1 : Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
    }
  }
  const found = [];
  let i = 0, j = 0;
  while (i < a.length && j < b.length) {
    if (a[i] === b[j]) { found.push(['=', a[i]]); i++; j++; }
    else if (best[(i + 1) * width + j] >= best[i * width + j + 1]) found.push(['-', a[i++]]);
    else found.push(['+', b[j++]]);
  }
  while (i < a.length) found.push(['-', a[i++]]);
  while (j < b.length) found.push(['+', b[j++]]);
  return found;
}

function merged(pieces) {
  const found = [];
  for (const [kind, text] of pieces) {
    if (!text) continue;
    if (found.length && found.at(-1)[0] === kind) found.at(-1)[1] += text; else found.push([kind, text]);
  }
  return found;
}

// One side of a difference, as an element.
function differing(before, after, side) {
  const other = side === 'before' ? '+' : '-';
  const pieces = difference(before, after).filter(([kind]) => kind !== other);
  return el('pre', {}, pieces.map(([kind, text]) => (kind === '=' ? text : el(side === 'before' ? 'del' : 'ins', {}, text))));
}
