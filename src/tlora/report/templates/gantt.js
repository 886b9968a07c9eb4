window.addEventListener('load', async () => {
  if (!('DecompressionStream' in window)) return;
  const data = JSON.parse(await unpack('gantt-data'));
  const byId = id => document.getElementById('gantt-' + id);
  const box = document.getElementById('gantt'), canvas = byId('canvas'), tip = byId('tip'), pen = canvas.getContext('2d');
  const LEFT = 52, BOTTOM = 26, TOP = 4, rows = data.gpus;
  const rowHeight = Math.min(22, 640 / rows);
  const height = TOP + BOTTOM + Math.max(60, rowHeight * rows);
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000,
    1728000, 4320000, 8640000];
  let width = 0, spans = null, view = [0, data.end], dragged = null, pointed = -1;

  byId('policy').append(...data.policies.map((policy, index) => new Option(policy.name, index, index === data.first, index === data.first)));
  const x = time => LEFT + (time - view[0]) / (view[1] - view[0]) * (width - LEFT);
  const y = row => TOP + row * rowHeight;
  const timeAt = px => view[0] + (Math.min(Math.max(px, LEFT), width) - LEFT) / (width - LEFT) * (view[1] - view[0]);
  const clock = (time, step) => {
    const days = Math.floor(time / 86400), rest = time - days * 86400, two = n => String(Math.floor(n)).padStart(2, '0');
    const day = data.end > 86400 ? days + ' d ' : '';
    if (step >= 86400) return day.trim() || '0 d';
    const tail = step < 60 ? ':' + (step < 1 ? (rest % 60).toFixed(2).padStart(5, '0') : two(rest % 60)) : '';
    return day + two(rest / 3600) + ':' + two(rest / 60 % 60) + tail;
  };
  const lasting = seconds => seconds < 100 ? seconds.toPrecision(3) + ' s' : seconds < 6000 ? (seconds / 60).toFixed(1) + ' min'
    : seconds < 172800 ? (seconds / 3600).toFixed(1) + ' h' : (seconds / 86400).toFixed(1) + ' d';
  const sizes = [[1, '1 member', '#8a929c'], [2, '2', '#2f9fd0'], [4, '3 to 4', '#3564d8'], [8, '5 to 8', '#8b6fe8'],
    [16, '9 to 16', '#d946a6'], [Infinity, 'more', '#ef6c3e']];
  const colourOf = {
    group: at => 'hsl(' + Math.round(spans.group[at] * 137.508 % 360) + ' 58% ' + [52, 62, 44][spans.group[at] % 3] + '%)',
    base: at => data.colours[spans.base[at]],
    members: at => sizes.find(([most]) => spans.jobs[at].length <= most)[2],
  };

  function drawAxes(colour) {
    pen.font = '11px system-ui, sans-serif';
    pen.fillStyle = colour('faint');
    pen.textBaseline = 'middle';
    pen.textAlign = 'right';
    const every = Math.max(1, 2 ** Math.ceil(Math.log2(14 / rowHeight)));
    for (let row = 0; row < rows; row += every) pen.fillText((row ? '' : 'GPU ') + row, LEFT - 6, y(row) + Math.min(rowHeight, 12) / 2 + 1);
    pen.textAlign = 'center';
    const span = view[1] - view[0], most = Math.max(2, (width - LEFT) / 95);
    const step = steps.find(each => span / each <= most) || 8640000 * Math.ceil(span / 8640000 / most);
    const fine = span / step < 1.5 ? span / 4 : step;
    for (let time = Math.ceil(view[0] / fine) * fine; time <= view[1]; time += fine) {
      pen.fillStyle = colour('grid');
      pen.fillRect(Math.round(x(time)), TOP, 1, height - TOP - BOTTOM);
      pen.fillStyle = colour('faint');
      if (x(time) < width - 26 && x(time) > LEFT + 8) pen.fillText(clock(time, fine), x(time), height - BOTTOM / 2);
    }
  }

  function draw() {
    const scale = window.devicePixelRatio || 1, colour = colours();
    width = canvas.clientWidth;
    canvas.style.height = height + 'px';
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    drawAxes(colour);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, width - LEFT, height);
    pen.clip();
    const paint = colourOf[byId('colour').value], gap = rowHeight >= 4 ? 1 : 0;
    for (let at = 0; at < spans.start.length; at++) {
      if (spans.end[at] < view[0] || spans.start[at] > view[1]) continue;
      const left = x(spans.start[at]), wide = Math.max(x(spans.end[at]) - left - (x(spans.end[at]) - left > 4 ? .6 : 0), .7);
      pen.fillStyle = at === pointed ? colour('ink') : paint(at);
      for (let run = 0; run < spans.rows[at].length; run += 2) {
        const tall = (spans.rows[at][run + 1] - spans.rows[at][run] + 1) * rowHeight - gap;
        pen.fillRect(left, y(spans.rows[at][run]), wide, tall);
        if (wide < 46 || tall < 13 || at === pointed) continue;
        pen.save();
        pen.fillStyle = '#fff';
        pen.textAlign = 'left';
        const count = spans.jobs[at].length;
        pen.fillText(count === 1 ? '1 job' : count + ' jobs', Math.max(left, LEFT) + 5, y(spans.rows[at][run]) + tall / 2);
        pen.restore();
      }
    }
    if (dragged && dragged[0] !== dragged[1]) {
      pen.globalAlpha = .25;
      pen.fillStyle = colour('accent');
      pen.fillRect(Math.min(...dragged), TOP, Math.abs(dragged[1] - dragged[0]), height - TOP - BOTTOM);
    }
    pen.restore();
    box.dataset.drawn = spans.start.length;
  }

  function look(from, to) {
    const least = data.end / 1e6, span = Math.min(Math.max(to - from, least), data.end);
    const start = Math.min(Math.max(from, 0), data.end - span);
    view = [start, start + span];
    hide();
    draw();
  }
  function hide() { tip.hidden = true; pointed = -1; }
  function choose() {
    spans = data.policies[byId('policy').value].spans;
    const key = byId('key'), how = byId('colour').value;
    const entries = how === 'base' ? data.bases.map((name, index) => [name, data.colours[index]])
      : how === 'members' ? sizes.map(([, name, colour]) => [name, colour]) : [];
    key.replaceChildren(...entries.map(([name, colour]) => {
      const entry = document.createElement('span'), mark = document.createElement('span');
      mark.className = 'dot';
      mark.style.background = colour;
      entry.append(mark, name);
      return entry;
    }));
    if (!entries.length) key.textContent = 'A colour for each group; a group that changes its members keeps it.';
    hide();
    draw();
  }
  function found(px, py) {
    const time = timeAt(px), row = Math.floor((py - TOP) / rowHeight), reach = (view[1] - view[0]) / (width - LEFT);
    if (px < LEFT || row < 0 || row >= rows) return -1;
    let near = -1;
    for (let at = spans.start.length - 1; at >= 0; at--) {
      if (time < spans.start[at] - reach || time > spans.end[at] + reach) continue;
      const runs = spans.rows[at];
      for (let run = 0; run < runs.length; run += 2) if (row >= runs[run] && row <= runs[run + 1]) {
        if (time >= spans.start[at] && time <= spans.end[at]) return at;
        near = at;
      }
    }
    return near;
  }
  function tell(at, px, py) {
    const runs = spans.rows[at], listed = [], ids = spans.jobs[at].map(job => data.jobs[job]);
    const step = Math.min((view[1] - view[0]) / 100, 59);
    for (let run = 0; run < runs.length; run += 2) listed.push([...new Set([runs[run], runs[run + 1]])].join('\u2013'));
    tip.textContent = [
      'Group ' + spans.names[spans.group[at]] + ', ' + data.bases[spans.base[at]],
      (runs[0] === runs.at(-1) ? 'GPU ' : 'GPUs ') + listed.join(', '),
      clock(spans.start[at], step) + ' to ' + clock(spans.end[at], step) + ' (' + lasting(spans.end[at] - spans.start[at]) + ')',
      ids.length + (ids.length === 1 ? ' member: ' : ' members: ') + ids.slice(0, 12).join(', ')
        + (ids.length > 12 ? ' and ' + (ids.length - 12) + ' more' : ''),
    ].join('\n');
    tip.hidden = false;
    const left = canvas.offsetLeft + px + 14, over = left + tip.offsetWidth > box.clientWidth - 4;
    tip.style.left = Math.max(4, over ? canvas.offsetLeft + px - tip.offsetWidth - 12 : left) + 'px';
    tip.style.top = Math.min(canvas.offsetTop + py + 12, box.clientHeight - tip.offsetHeight - 4) + 'px';
  }

  canvas.addEventListener('pointerdown', event => {
    if (event.button) return;
    dragged = [event.offsetX, event.offsetX];
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener('pointermove', event => {
    if (dragged) { dragged[1] = event.offsetX; hide(); return draw(); }
    const at = found(event.offsetX, event.offsetY);
    if (at !== pointed) { pointed = at; draw(); }
    at < 0 ? hide() : tell(at, event.offsetX, event.offsetY);
  });
  canvas.addEventListener('pointerup', () => {
    const [one, other] = dragged || [0, 0];
    dragged = null;
    if (Math.abs(one - other) > 4) look(timeAt(Math.min(one, other)), timeAt(Math.max(one, other)));
  });
  canvas.addEventListener('pointerleave', () => { if (!dragged) { hide(); draw(); } });
  canvas.addEventListener('pointercancel', () => { dragged = null; hide(); draw(); });
  canvas.addEventListener('dblclick', () => look(0, data.end));
  const acts = {
    in: span => look(view[0] + span / 4, view[1] - span / 4), out: span => look(view[0] - span / 2, view[1] + span / 2),
    left: span => look(view[0] - span / 3, view[1] - span / 3), right: span => look(view[0] + span / 3, view[1] + span / 3),
    all: () => look(0, data.end),
  };
  for (const button of all('button[data-act]', box)) button.addEventListener('click', () => acts[button.dataset.act](view[1] - view[0]));
  const keys = {'+': 'in', '-': 'out', ArrowLeft: 'left', ArrowRight: 'right', '0': 'all'};
  canvas.addEventListener('keydown', event => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    acts[keys[event.key]](view[1] - view[0]);
  });
  byId('policy').addEventListener('change', choose);
  byId('colour').addEventListener('change', choose);
  new ResizeObserver(() => { if (canvas.clientWidth !== width) draw(); }).observe(box);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
  choose();
});
