// The page's script: unpacks plotly.js and the numbers, draws the charts, and runs the legend, the axes, sorting, folds and themes.
// It reads the document that page.html writes and nothing else; the tables are complete without it.
const FAINT_UP_TO = {{ faint_up_to }};  // groups shown at once: above that, the raw values under the averages are a fog
const ROWS_SHOWN = {{ rows_shown }};  // of a table; a button under a longer one shows the rest
const CHIPS_OPEN = 24;  // of the legend; a longer one is folded
const PRINT_WIDTH = 640;  // pixels of a chart: A4 and letter without their margins
const all = (selector, from = document) => [...from.querySelectorAll(selector)];
const off = new Set(), apart = new Set();
let drawn = [], axis = 'step', lines = 'mean';

async function unpack(id) {
  const packed = document.getElementById(id);
  const bytes = Uint8Array.from(atob(packed.textContent), letter => letter.charCodeAt(0));
  packed.remove();
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'))).text();
}

function colours() {
  const style = getComputedStyle(document.documentElement);
  return name => style.getPropertyValue('--' + name).trim();
}

function themed(layout) {
  const colour = colours();
  const axisStyle = {gridcolor: colour('grid'), linecolor: colour('line'), zerolinecolor: colour('line'), automargin: true};
  const result = {
    margin: {l: 58, r: 14, t: 10, b: 44}, hovermode: 'closest', showlegend: false, ...layout, autosize: true,
    paper_bgcolor: 'transparent', plot_bgcolor: 'transparent', font: {color: colour('ink'), size: 12, family: 'inherit'},
    modebar: {bgcolor: 'transparent', color: colour('line'), activecolor: colour('faint')},
    hoverlabel: {bgcolor: colour('card'), bordercolor: colour('line'), font: {color: colour('ink')}},
  };
  for (const key of ['xaxis', 'yaxis', 'yaxis2'])
    if (layout[key]) result[key] = {...axisStyle, ...layout[key], title: {standoff: 8, ...layout[key].title}};
  return result;
}

function visible(trace, few) {
  if (off.has(trace.legendgroup)) return false;
  const role = trace.meta && trace.meta.role;
  if (role === 'mean') return lines === 'mean';
  return role !== 'raw' || lines === 'raw' || few;
}

function dimmed(trace) {
  if (!trace.meta || trace.meta.role !== 'raw') return;
  const faint = lines === 'mean';
  trace.meta.width = trace.meta.width || trace.line.width;
  trace.opacity = faint ? .28 : 1;
  trace.line = {...trace.line, width: faint ? 1 : trace.meta.width};
}

function fewShown() {
  return all('.chip').length - off.size <= FAINT_UP_TO;
}

function prepared(figure) {
  const few = fewShown();
  const offered = figure.layout.meta && figure.layout.meta.x;
  for (const trace of figure.data) {
    trace.visible = visible(trace, few);
    dimmed(trace);
    if (offered && trace.meta && trace.meta.x) trace.x = trace.meta.x[axis];
  }
  if (offered) figure.layout.xaxis.title = {...figure.layout.xaxis.title, text: offered[axis]};
  return figure;
}

async function redraw(which = drawn) {
  for (const {place, figure} of which) {
    prepared(figure);
    await Plotly.react(place, figure.data, themed(figure.layout), {responsive: true, displaylogo: false,
      modeBarButtons: [['zoom2d', 'pan2d', 'resetScale2d', 'toImage']]});
    if (!apart.has(place)) place.on('plotly_afterplot', () => keepApart(place, figure));
    apart.add(place);
    keepApart(place, figure);
  }
}

// plotly.js labels 7, 8, 9 and 10 of a logarithmic axis though they overlap: 1, 5 and 2 go before the others, which hide where none fits.
function keepApart(place, figure) {
  const isLog = figure.layout.yaxis && figure.layout.yaxis.type === 'log', kept = [];
  const order = label => '152'.indexOf((label.textContent.match(/[1-9]/) || ['0'])[0]) >>> 0;
  for (const label of all('.ytick text', place).sort((one, other) => order(one) - order(other))) {
    const box = label.getBoundingClientRect();
    const fits = !isLog || kept.every(other => box.bottom <= other.top || box.top >= other.bottom);
    label.style.visibility = fits ? '' : 'hidden';
    if (fits) kept.push(box);
  }
}

function toggleGroups() {
  const chips = all('.chip');
  for (const chip of chips) chip.setAttribute('aria-pressed', String(!off.has(chip.dataset.group)));
  document.getElementById('shown').textContent = (chips.length - off.size) + ' of ' + chips.length + ' shown';
  redraw(drawn.filter(({figure}) => figure.data.some(trace => trace.legendgroup)));
}

function wireLegend() {
  const chips = all('.chip'), groups = chips.map(chip => chip.dataset.group);
  for (const chip of chips) {
    chip.title += '\nclick: show or hide · double click: only this one';
    chip.addEventListener('click', () => {
      const group = chip.dataset.group;
      off.has(group) ? off.delete(group) : off.add(group);
      toggleGroups();
    });
    chip.addEventListener('dblclick', () => {
      off.clear();
      groups.filter(group => group !== chip.dataset.group).forEach(group => off.add(group));
      toggleGroups();
    });
  }
  const fold = document.querySelector('.legend details');
  if (fold && (chips.length > CHIPS_OPEN || (chips.length > 6 && innerWidth < 700))) fold.open = false;
  const found = () => chips.filter(chip => !chip.hidden).map(chip => chip.dataset.group);
  const on = (id, event, action) => { const element = document.getElementById(id); if (element) element.addEventListener(event, action); };
  on('all', 'click', () => { found().forEach(group => off.delete(group)); toggleGroups(); });
  on('none', 'click', () => { found().forEach(group => off.add(group)); toggleGroups(); });
  on('find', 'input', event => {
    fold.open = true;
    const wanted = event.target.value.toLowerCase();
    for (const chip of chips) chip.hidden = !chip.dataset.group.toLowerCase().includes(wanted);
  });
}

function wireAxis() {
  const offered = drawn.map(({figure}) => figure.layout.meta && figure.layout.meta.x).find(Boolean);
  const label = document.getElementById('axis');
  if (!offered || !label) return;
  const select = label.querySelector('select');
  for (const [key, title] of Object.entries(offered)) select.add(new Option(title, key));
  label.hidden = false;
  select.addEventListener('change', () => {
    axis = select.value;
    redraw(drawn.filter(({figure}) => figure.layout.meta && figure.layout.meta.x));
  });
}

function wireLines() {
  const label = document.getElementById('lines');
  const averaged = ({figure}) => figure.data.some(trace => trace.meta && trace.meta.role);
  if (!label || !drawn.some(averaged)) return;
  label.hidden = false;
  label.querySelector('select').addEventListener('change', event => {
    lines = event.target.value;
    redraw(drawn.filter(averaged));
  });
}

function wireScales() {
  for (const button of all('.scales button')) button.addEventListener('click', () => {
    const chart = drawn[Number(button.dataset.chart)], scale = button.dataset.scale;
    for (const other of all('button', button.parentNode)) other.setAttribute('aria-pressed', String(other === button));
    for (const text of all('.unshown', button.closest('figure'))) text.hidden = scale !== 'log';
    chart.figure.layout.yaxis.type = scale;
    redraw([chart]);
  });
}

// What is left out of sight says so: rows below a fold, and columns to the right of a table that is wider than the page.
function wireTables() {
  for (const table of all('.scroll > table')) {
    const frame = table.parentNode, count = table.tBodies[0].rows.length;
    if (count > ROWS_SHOWN) {
      const button = document.createElement('button');
      const tell = () => {
        const folded = table.classList.contains('folded');
        button.textContent = folded ? ROWS_SHOWN + ' of ' + count + ' rows: show all' : 'show ' + ROWS_SHOWN + ' of ' + count + ' rows';
      };
      button.className = 'unfold';
      button.addEventListener('click', () => { table.classList.toggle('folded'); tell(); });
      table.classList.add('folded');
      tell();
      frame.after(button);
    }
    const sign = document.createElement('p');
    sign.className = 'faint wider';
    sign.textContent = 'More columns to the right: scroll the table sideways.';
    frame.before(sign);
    new ResizeObserver(() => { sign.hidden = frame.scrollWidth <= frame.clientWidth + 1; }).observe(frame);
  }
}

function wireSorting() {
  for (const head of all('.sortable thead th')) head.addEventListener('click', () => {
    const down = head.getAttribute('aria-sort') === 'ascending';
    all('th', head.parentNode).forEach(other => other.removeAttribute('aria-sort'));
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const body = head.closest('table').tBodies[0], numeric = head.classList.contains('number');
    const key = row => {
      const cell = row.cells[head.cellIndex];
      return numeric ? (cell.dataset.value === undefined ? null : Number(cell.dataset.value)) : cell.textContent;
    };
    const compare = (a, b) => numeric ? a - b : a.localeCompare(b, undefined, {numeric: true});
    const keyed = [...body.rows].map(row => [key(row), row]);
    keyed.sort(([a], [b]) => a === null || b === null ? (a === null) - (b === null) : compare(a, b) * (down ? -1 : 1));
    body.append(...keyed.map(([, row]) => row));
  });
}

// A page of paper is narrower than a screen, and its width is not known before it is printed.
function wirePrint() {
  addEventListener('beforeprint', () => {
    for (const {place} of drawn) Plotly.relayout(place, {autosize: false, width: PRINT_WIDTH});
  });
  addEventListener('afterprint', () => redraw());
}

async function start() {
  document.documentElement.dataset.script = 'yes';
  wireSorting();
  wireTables();
  const places = all('.plot');
  if (!places.length) return;
  if (!('DecompressionStream' in window)) {
    places.forEach(place => { place.innerHTML = '<div class="message">Charts need a browser of 2023 or newer.</div>'; });
    return;
  }
  const library = document.createElement('script');
  library.textContent = await unpack('library');
  document.head.append(library);
  const payload = JSON.parse(await unpack('payload'));
  const whole = value => {
    if (value === null || typeof value !== 'object') return value;
    if (value.$ !== undefined) return payload.shared[value.$];
    if (Array.isArray(value)) return value.map(whole);
    return Object.fromEntries(Object.entries(value).map(([key, entry]) => [key, whole(entry)]));
  };
  drawn = payload.figures.map((figure, index) => ({place: places[index], figure: whole(figure)}));
  wireLegend();
  wireAxis();
  wireLines();
  wireScales();
  wirePrint();
  await redraw();
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => redraw());
  document.documentElement.dataset.drawn = 'yes';
}

start();
