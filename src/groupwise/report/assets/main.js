// The page, from its data.

function header() {
  const { data } = state;
  const bytes = document.documentElement.outerHTML.length;
  const theme = el('button', { type: 'button', id: 'theme', click: () => {
    const dark = getComputedStyle(document.documentElement).getPropertyValue('color-scheme').trim() === 'dark';
    document.documentElement.dataset.theme = dark ? 'light' : 'dark';
  } }, 'light / dark');
  return el('header', {}, el('h1', {}, data.runs.map((run) => run.name).join(', ')), theme,
    el('p', { class: 'note' }, 'groupwise ' + data.version + ', written ' + data.made + ', ' + (bytes / 2 ** 20).toFixed(1) + ' MiB'));
}

function navigation(sections) {
  return el('nav', { 'aria-label': 'Sections' }, sections.map((one) => el('a', { href: '#' + one.id }, one.querySelector('h2').textContent)));
}

// Where the address points: a completion, a held-out problem, or a part of the page, which is unfolded and drawn first.
async function follow() {
  let parts, target;
  try { parts = location.hash.slice(1).split('/').map(decodeURIComponent); } catch (malformed) { return; }
  if (parts[0] === 'completion') target = await openCompletion(...parts.slice(1));
  else if (parts[0] === 'held-out') target = await openHeldOut(...parts.slice(1));
  else target = parts[0] && document.getElementById(parts[0]);
  if (!target) return;
  for (let fold = target.closest('details'); fold; fold = fold.parentNode.closest('details')) fold.open = true;
  target.dispatchEvent(new Event('draw'));
  stayAt(target);
}

// What is drawn above moves the target away from the top of the window, where it stays until somebody does something.
let leave = () => {};

function stayAt(target) {
  leave();
  const observer = new ResizeObserver(() => target.scrollIntoView());
  observer.observe(document.getElementById('page'));
  leave = () => observer.disconnect();
}

for (const deed of ['wheel', 'pointerdown', 'touchstart', 'keydown']) window.addEventListener(deed, () => leave(), { passive: true });

// On paper nothing is lost: groups of charts are unfolded and all charts drawn.
function forPaper() {
  for (const fold of document.querySelectorAll('#curves details')) fold.open = true;
  for (const place of document.querySelectorAll('#curves .place:empty, #distributions .place:empty')) place.dispatchEvent(new Event('draw'));
}

function start() {
  state.data = JSON.parse(document.getElementById('data').textContent);
  const sections = [overviewSection, findingsSection, curvesSection, distributionsSection, evaluationsSection, beforeAfterSection, completionsSection, settingsSection]
    .map((make) => make()).filter((made) => made !== null);
  document.getElementById('page').append(header(), navigation(sections), el('main', {}, sections));
  window.addEventListener('hashchange', follow);
  window.addEventListener('beforeprint', forPaper);
  matchMedia('print').addEventListener('change', (paper) => paper.matches && forPaper());
  follow();
  document.documentElement.dataset.ready = 'true';
}

start();
