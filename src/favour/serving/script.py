"""The page's script.

The picture of a three-class belief shows softmax(μ + Lε_k) for fixed ε_k, LLᵀ = Σ: what draws of the network would look
like, made in the browser from the mean and covariance that the server sent, with the probabilities p̄ as a dot.
"""

SCRIPT = r"""
"use strict";
const model = JSON.parse(document.getElementById("model").textContent);
const $ = id => document.getElementById(id);
const NS = "http://www.w3.org/2000/svg";
const whole = port => !port.dtype.startsWith("float");
const sizes = port => port.shape.slice(1).map(n => n === null ? 4 : n);
const count = port => sizes(port).reduce((a, b) => a * b, 1);
const past = [];  // earlier answers of a regression
const seen = model.seen;  // what the training inputs are like, where the file says so
let again = null;  // draws what is shown anew: when the window changes its width

// ---- small things

function generator(seed) {  // mulberry32: the same pictures for the same answer
  return () => {
    seed = (seed + 0x6D2B79F5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}
function normal(random) {
  return Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());
}
function nice(v) {
  if (v === 0) return "0";
  const a = Math.abs(v);
  if (a >= 1e5 || a < 1e-3) return v.toExponential(2).replace("-", "−").replace("e+", "e");
  return String(+v.toPrecision(4)).replace("-", "−");
}
function percent(p) {
  if (p > 0 && p < 0.001) return "< 0.1 %";
  if (p < 1 && p > 0.999) return "> 99.9 %";
  return (100 * p).toFixed(1) + " %";
}
function element(tag, attributes, text) {
  const e = document.createElementNS(NS, tag);
  for (const k in attributes) e.setAttribute(k, attributes[k]);
  if (text !== undefined) e.textContent = text;
  return e;
}
function html(tag, name, text) {
  const e = document.createElement(tag);
  if (name) e.className = name;
  if (text !== undefined) e.textContent = text;
  return e;
}
function svg(width, height, title) {
  return element("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title});
}
const room = () => Math.max(260, $("result").clientWidth);  // a unit of a picture is a pixel, so text has its size
const label = i => model.labels ? model.labels[i] : "class " + i;
function softmax(z) {
  const top = Math.max(...z), e = z.map(v => Math.exp(v - top)), sum = e.reduce((a, b) => a + b);
  return e.map(v => v / sum);
}
const entropy = p => -p.reduce((sum, v) => sum + (v > 0 ? v * Math.log(v) : 0), 0);
function cholesky(a) {  // of a matrix that may be singular
  const n = a.length, l = a.map(() => Array(n).fill(0));
  for (let i = 0; i < n; i++) for (let j = 0; j <= i; j++) {
    let s = a[i][j];
    for (let k = 0; k < j; k++) s -= l[i][k] * l[j][k];
    l[i][j] = i === j ? Math.sqrt(Math.max(s, 0)) : l[j][j] > 0 ? s / l[j][j] : 0;
  }
  return l;
}

// ---- the input

function nested(flat, shape) {
  if (shape.length < 2) return shape.length ? flat : flat[0];
  const step = flat.length / shape[0];
  return Array.from({length: shape[0]}, (_, i) => nested(flat.slice(i * step, (i + 1) * step), shape.slice(1)));
}
const about = (i, side, k) => { const list = seen.inputs[i][side]; return list[list.length > 1 ? k : 0]; };
function preset(kind, port, i) {
  const random = generator(Math.floor(Math.random() * 2 ** 31)), n = count(port);
  const spread = (k, times) => {
    const v = seen ? about(i, "mean", k) + times * about(i, "stddev", k) * normal(random) : times * normal(random);
    return times === 1 && seen ? Math.min(Math.max(v, about(i, "low", k)), about(i, "high", k)) : v;
  };
  const one = {
    zeros: () => whole(port) ? 1 : 0,
    ones: () => 1,
    random: (_, k) => !whole(port) ? +spread(k, 1).toPrecision(4) :
      seen ? Math.round(spread(k, 1)) : Math.floor(random() * 10),
    far: (_, k) => whole(port) ? 1 : +spread(k, 10).toPrecision(4),
  }[kind];
  return Array.from({length: n}, one);
}
function fill(kind) {
  model.inputs.forEach((port, i) => { $("text-" + i).value = preset(kind, port, i).join(", "); });
  fields();
  predict();
}
// One row: numbers with anything between them, or JSON of the right nesting; a JSON list of rows as well.
function rows(port, i) {
  const text = $("text-" + i).value.trim();
  if (text.startsWith("[")) {
    let value = JSON.parse(text);
    let depth = 0;
    for (let v = value; Array.isArray(v); v = v[0]) depth++;
    if (depth === 1 && sizes(port).length > 1 && value.length === count(port)) value = nested(value, sizes(port));
    else if (depth === port.shape.length) return value;
    return [value];
  }
  const words = text.split(/[\s,;]+/).filter(w => w);
  const numbers = words.map(Number);
  const bad = words.find((w, k) => Number.isNaN(numbers[k]));
  if (bad !== undefined) throw new Error(`${port.name}: “${bad.slice(0, 30)}” is not a number.`);
  const fixed = !port.shape.slice(1).includes(null);
  if (fixed && numbers.length !== count(port))
    throw new Error(`${port.name}: ${numbers.length} numbers; one row has ${count(port)}.`);
  return [nested(numbers, fixed ? port.shape.slice(1) : [numbers.length])];
}
function fields() {  // sliders for a short row, in step with the text
  const box = $("fields"), port = model.inputs[0];
  if (model.inputs.length > 1 || whole(port) || count(port) > 12 || port.shape.includes(null, 1)) return;
  const values = $("text-0").value.split(/[\s,;]+/).filter(w => w).map(Number);
  if (values.length !== count(port) || values.some(Number.isNaN)) return;
  box.hidden = false;
  if (box.children.length !== values.length) {
    box.replaceChildren(...values.map((_, k) => {
      const line = html("div", "field"), slide = html("input"), number = html("input");
      slide.type = "range"; number.type = "number"; number.step = "any";
      for (const e of [slide, number]) e.setAttribute("aria-label", `${port.name}[${k}]`);
      const [low, high] = seen ? [about(0, "low", k), about(0, "high", k)] : [-4, 4], width = high - low || 1;
      slide.min = low - (seen ? width / 2 : 0); slide.max = high + (seen ? width / 2 : 0); slide.step = width / 800;
      const change = from => {
        const all = $("text-0").value.split(/[\s,;]+/).filter(w => w);
        all[k] = from.value;
        $("text-0").value = all.join(", ");
        (from === slide ? number : slide).value = from.value;
        later();
      };
      slide.addEventListener("input", () => change(slide));
      number.addEventListener("input", () => { if (number.value !== "") change(number); });
      line.append(html("span", "soft", "x" + (k + 1)), slide, number);
      return line;
    }));
  }
  [...box.children].forEach((line, k) => { line.children[1].value = values[k]; line.children[2].value = values[k]; });
}
let timer = 0;
function later() { clearTimeout(timer); timer = setTimeout(predict, 60); }

// ---- asking

let latest = 0;
async function predict() {
  const turn = ++latest;
  let body;
  try {
    const inputs = {};
    model.inputs.forEach((port, i) => { inputs[port.name] = rows(port, i); });
    body = JSON.stringify({inputs: model.inputs.length > 1 ? inputs : inputs[model.inputs[0].name]});
  } catch (problem) {
    return complain(problem.message);
  }
  try {
    const reply = await fetch("predict", {method: "POST", headers: {"Content-Type": "application/json"}, body});
    const answer = await reply.json();
    if (turn !== latest) return;
    if (!reply.ok) return complain(answer.error || `The server answered ${reply.status}.`);
    $("error").hidden = true;
    show(answer);
    const short = t => t.length > 1500 ? t.slice(0, 1500) + " …" : t;
    $("request").textContent = `curl -X POST ${location.origin}/predict \\\n` +
      `  -H 'Content-Type: application/json' \\\n  -d '${short(body)}'`;
    $("answer").textContent = short(JSON.stringify(answer, null, 1));
    $("raw").hidden = false;
  } catch (problem) {
    if (turn === latest) complain("The server cannot be reached.");
  }
}
function complain(words) {  // an answer to another input does not stay beside it
  $("error").textContent = words;
  $("error").hidden = false;
  $("raw").hidden = true;
  again = null;
  $("result").replaceChildren(html("p", "soft", "No prediction for this input."));
}

// ---- showing

function show(answer) {
  const first = {};
  for (const name in answer.outputs) first[name] = answer.outputs[name][0];
  if (model.kind === "regression" && [first.mean].flat(Infinity).length === 1) remember(first);
  again = () => {
    const parts = model.kind === "regression" ? regression(first) : classification(first);
    if (answer.rows > 1) parts.push(html("p", "soft", `The first of ${answer.rows} rows; the answer below has all.`));
    $("result").replaceChildren(...parts);
    $("result").classList.remove("old");
  };
  again();
}
function classification(out) {
  const p = out.probabilities.flat(Infinity), parts = [];
  const exclusive = model.link !== "multilabel";
  const order = p.map((_, i) => i).sort((a, b) => p[b] - p[a]);
  if (exclusive) {
    parts.push(html("p", "verdict", `${label(order[0])}, ${percent(p[order[0]])}`));
    if (p.length === 3 && out.mean.length === 3 && out.covariance) parts.push(simplex(out, p));
  }
  const shown = exclusive && p.length > 12 ? order.slice(0, 12) : p.map((_, i) => i).slice(0, 40);
  const spread = spreads(out, p, exclusive);
  parts.push(bars(p, shown, order[0], spread));
  if (spread) parts.push(html("p", "soft", "Whiskers: one standard deviation over draws of the network."));
  const scores = html("div", "scores"), most = Math.log(p.length), numbers = [];
  const add = (title, name, value, words) => {
    scores.append(meter(title, value, most, standing(name, value) || words));
    numbers.push(`${name === "jsd" ? "JSD" : "Entropy"}: ${nice(value)} of at most ${nice(most)} nats`);
  };
  if (out.jsd !== undefined)
    add("Disagreement of the network's draws", "jsd", out.jsd, agreement(out.jsd / most));
  if (exclusive) add("All uncertainty about the class", "entropy", entropy(p), "");
  parts.push(scores);
  if (numbers.length) {
    const more = html("details");
    more.append(html("summary", "", "In numbers"), ...numbers.map(n => html("p", "soft", n)));
    parts.push(more);
  }
  return parts;
}
// How many of the training inputs score less; null where the file does not say.
function standing(name, value) {
  const known = seen && seen.scores[name];
  if (!known) return null;
  const share = known.filter(v => v < value).length / known.length, most = name === "jsd" ? "Unfamiliar" : "Rarely so";
  const than = `more than for ${Math.min(99, Math.floor(100 * share))}% of the training inputs.`;
  return share > 0.99 ? `${most}: ${than}` : share > 0.9 ? `Unusual: ${than}` : `As among the training inputs: ${than}`;
}
function agreement(share) {
  return share < 0.01 ? "Draws agree about the class; far from the training data they may, and be wrong." :
    share < 0.05 ? "The network wavers a little." :
    "The network disagrees with itself: the input may be unlike its training data.";
}
function meter(title, value, most, words) {
  const box = html("div"), track = html("div", "meter"), fill = html("div");
  fill.style.width = Math.min(100, 100 * value / most).toFixed(1) + "%";
  track.append(fill);
  box.append(html("div", "line", title), track);
  if (words) box.append(html("p", "soft", words));
  return box;
}
function drawn(out, n) {  // of the belief, from its covariance
  const spread = cholesky(out.covariance), random = generator(7);
  return Array.from({length: n}, () => {
    const e = out.mean.map(() => normal(random));
    return out.mean.map((m, i) => m + spread[i].reduce((s, l, j) => s + l * e[j], 0));
  });
}
// Standard deviations of the probabilities over draws; null where the belief's covariance is not in the answer.
function spreads(out, p, exclusive) {
  if (!exclusive || !out.covariance || out.mean.length !== p.length) return null;
  const draws = drawn(out, 400).map(softmax);
  return p.map((_, i) => {
    const mean = draws.reduce((s, q) => s + q[i], 0) / draws.length;
    return Math.sqrt(draws.reduce((s, q) => s + (q[i] - mean) ** 2, 0) / draws.length);
  });
}
function bars(p, shown, best, spread) {
  const line = 26, all = room(), track = all - 178;
  const picture = svg(all, shown.length * line + 4, "Class probabilities");
  shown.forEach((i, row) => {
    const y = row * line + 4, name = label(i), width = Math.max(1, track * p[i]);
    picture.append(
      element("text", {x: 0, y: y + 14}, name.length > 14 ? name.slice(0, 13) + "…" : name),
      element("rect", {x: 108, y, width: track, height: 18, rx: 3, class: "track"}),
      element("rect", {x: 108, y, width, height: 18, rx: 3, class: i === best ? "bar" : "other"}),
      element("text", {x: all - 2, y: y + 14, class: "end"}, percent(p[i])));
    if (spread && spread[i] > 0.002) {
      const [from, to] = [Math.max(0, p[i] - spread[i]), Math.min(1, p[i] + spread[i])].map(v => 108 + track * v);
      const d = `M${from} ${y + 9}H${to}M${from} ${y + 5}v8M${to} ${y + 5}v8`;
      picture.append(element("path", {d, class: "whisker"}));
    }
  });
  return picture;
}
function simplex(out, p) {
  const at = [[30, 262], [330, 262], [180, 22]];
  const place = q => [0, 1].map(d => q[0] * at[0][d] + q[1] * at[1][d] + q[2] * at[2][d]);
  const picture = svg(360, 300, "The belief on the simplex of three classes");
  picture.classList.add("square");
  picture.append(element("path", {d: `M${at[0]}L${at[1]}L${at[2]}Z`, class: "edge"}));
  for (const t of [0.25, 0.5, 0.75]) for (let k = 0; k < 3; k++) {
    const a = [0, 0, 0], b = [0, 0, 0];
    a[k] = b[k] = t; a[(k + 1) % 3] = 1 - t; b[(k + 2) % 3] = 1 - t;
    picture.append(element("path", {d: `M${place(a)}L${place(b)}`, class: "grid"}));
  }
  for (const z of drawn(out, 300)) {
    const [x, y] = place(softmax(z));
    picture.append(element("circle", {cx: x.toFixed(1), cy: y.toFixed(1), r: 2.4, class: "draw"}));
  }
  const [x, y] = place(p);
  picture.append(element("circle", {cx: x.toFixed(1), cy: y.toFixed(1), r: 6, class: "point"}));
  [["", 30, 284], ["end", 330, 284], ["middle", 180, 14]].forEach(([anchor, tx, ty], i) =>
    picture.append(element("text", {x: tx, y: ty, class: anchor}, label(i).slice(0, 18))));
  const box = html("div");
  box.append(picture, html("p", "soft", "Each corner is certainty of one class. Blue: draws from the belief; dot: " +
    "the probabilities. A cloud that is wide means the network's opinion is not settled."));
  return box;
}
function remember(out) {
  const one = k => [out[k]].flat(Infinity)[0];
  past.unshift({mean: one("mean"), sd: one("stddev"), low: one("lower"), high: one("upper")});
  past.length = Math.min(past.length, 6);
}
function regression(out) {
  const mean = out.mean === undefined ? [] : [out.mean].flat(Infinity), flat = k => [out[k]].flat(Infinity);
  const [sd, low, high] = [flat("stddev"), flat("lower"), flat("upper")];
  const level = Math.round(100 * model.level), parts = [];
  if (mean.length === 1) {
    parts.push(html("p", "verdict", `${nice(mean[0])} ± ${nice(sd[0])}`));
    parts.push(html("p", "soft", `${level} % interval: ${nice(low[0])} to ${nice(high[0])}`));
    parts.push(intervals(past.map((r, i) => ({...r, name: i ? `${i} before` : "now", past: i > 0}))));
  } else {
    const shown = mean.slice(0, 24);
    parts.push(intervals(shown.map((m, i) => ({mean: m, sd: sd[i], low: low[i], high: high[i], name: "y" + (i + 1)}))));
    if (mean.length > 24) parts.push(html("p", "soft", `The first 24 of ${mean.length} outputs.`));
  }
  const words = standing("stddev", sd.reduce((a, b) => a + b, 0) / sd.length);
  if (words) parts.push(html("p", "soft", `Uncertainty. ${words}`));
  parts.push(html("p", "soft", `Dot: mean; thick: one standard deviation; thin: ${level} % interval.`));
  return parts;
}
function intervals(list) {
  let from = Math.min(...list.map(r => r.low)), to = Math.max(...list.map(r => r.high));
  const pad = 0.06 * (to - from) || Math.abs(from) * 0.1 || 1;
  from -= pad; to += pad;
  const line = 34, height = list.length * line + 34, all = room(), picture = svg(all, height, "Intervals");
  const x = v => 70 + (all - 80) * (v - from) / (to - from);
  const raw = (to - from) / 4, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(k => k * power).find(s => s >= raw * 0.8);
  for (let k = Math.ceil(from / step); k * step <= to; k++) {
    const at = x(k * step);
    picture.append(element("path", {d: `M${at} 4V${height - 28}`, class: "grid"}),
      element("text", {x: at, y: height - 10, class: "middle faint"}, nice(+(k * step).toPrecision(12))));
  }
  list.forEach((r, i) => {
    const y = i * line + 20, group = element("g", {class: r.past ? "past" : ""});
    group.append(element("text", {x: 0, y: y + 4}, r.name),
      element("path", {d: `M${x(r.low)} ${y}H${x(r.high)}M${x(r.low)} ${y - 6}V${y + 6}M${x(r.high)} ${y - 6}V${y + 6}`,
        class: "wide", fill: "none"}),
      element("path", {d: `M${x(r.mean - r.sd)} ${y}H${x(r.mean + r.sd)}`, class: "thick"}),
      element("circle", {cx: x(r.mean), cy: y, r: 5, class: "point"}));
    picture.append(group);
  });
  return picture;
}

// ---- start

model.inputs.forEach((port, i) => {
  const name = html("label", "", `${port.name}: ${count(port)} numbers, or JSON`), text = html("textarea");
  text.id = name.htmlFor = "text-" + i;
  text.spellcheck = false;
  text.addEventListener("input", () => { fields(); $("result").classList.add("old"); });
  text.addEventListener("keydown", e => { if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) predict(); });
  $("texts").append(name, text);
});
for (const [kind, name] of [
    ["random", seen ? "Like the training data" : "Random"], ["zeros", "Zeros"], ["ones", "Ones"],
    ["far", seen ? "Far from it" : "Far away (×10)"]]) {
  const button = html("button", "", name);
  button.type = "button";
  button.dataset.preset = kind;
  if (seen && kind === "random") button.title = "Every entry by itself, with its mean, spread and range.";
  button.addEventListener("click", () => fill(kind));
  $("presets").append(button);
}
$("predict").addEventListener("click", predict);
addEventListener("resize", () => { if (again) again(); });
fill("random");
"""
