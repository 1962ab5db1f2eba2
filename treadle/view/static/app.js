// treadle view: the screens of a run. One file, no library. Every state is the part of the address after "#".
// Text of models, tools and tasks is hostile: it enters the page as text nodes alone (`h` and `visible`), never as
// markup, and no address, style or handler is ever made of it.
"use strict";

// ── elements ────────────────────────────────────────────────────────────────────────────────────────────────────────
const SVG = "http://www.w3.org/2000/svg";

function fill(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

function assign(node, attributes) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  return node;
}

const h = (tag, attributes, ...children) => fill(assign(document.createElement(tag), attributes), children);
const s = (tag, attributes, ...children) => fill(assign(document.createElementNS(SVG, tag), attributes), children);

// Control characters and marks that turn the reading direction are written out, as a terminal must do it, too.
const MARKS = "\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u2069\\ufeff\\ufff9-\\ufffb";
const HALF_PAIR = "[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]";
const CONTROL = new RegExp(`[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f${MARKS}]|${HALF_PAIR}`, "g");

const written = (letter) => {
  const code = letter.charCodeAt(0);
  return code < 32 ? String.fromCharCode(0x2400 + code) : "U+" + code.toString(16).toUpperCase().padStart(4, "0");
};
const plain = (text) => String(text).replace(CONTROL, written); // for attributes, titles and options

function visible(text) {
  const parts = [];
  let last = 0;
  for (const found of String(text).matchAll(CONTROL)) {
    parts.push(String(text).slice(last, found.index));
    parts.push(
      h(
        "span",
        { class: "ctl", title: "control character U+" + found[0].charCodeAt(0).toString(16).padStart(4, "0") },
        [written(found[0])],
      ),
    );
    last = found.index + found[0].length;
  }
  parts.push(String(text).slice(last));
  return parts;
}

// A screen of a live run is brought up to date in place: nodes that stay keep focus, selection and scroll position.
// Rows and cards are known by where they lead; a chart is replaced where its numbers changed, and pointed at as before.
function patch(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  if (fresh.drawn !== undefined) {
    if (old.drawn === fresh.drawn) return;
    old.replaceWith(fresh);
    if (old.pointedAt !== undefined) fresh.point(old.pointedAt);
    return;
  }
  if (old.isEqualNode(fresh)) return;
  const chosen = old.classList.contains("at");
  for (const { name } of [...old.attributes])
    if (name !== "style" && !fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes)
    if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  if (old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText; // as an attribute: forbidden
  if (chosen) old.classList.add("at");
  patchChildren(old, fresh);
}
function patchChildren(old, fresh) {
  const place = (node) => node.dataset?.href;
  const known = new Map([...old.children].filter(place).map((node) => [place(node), node]));
  let at = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    const same = place(child) ? known.get(place(child)) : at && !place(at) ? at : null;
    if (!same) {
      old.insertBefore(child, at);
      continue;
    }
    if (same === at) at = at.nextSibling;
    else old.insertBefore(same, at);
    patch(same, child);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

// ── numbers ─────────────────────────────────────────────────────────────────────────────────────────────────────────
function num(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return (value || 0).toLocaleString("en"); // no "-0"
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(1);
  return value.toLocaleString("en", { maximumFractionDigits: size >= 100 ? 0 : size >= 10 ? 1 : digits });
}
const fixed = (value, digits = 3) =>
  value === null || value === undefined ? "–" : Math.abs(value) >= 1000 ? num(value) : value.toFixed(digits);
const seconds = (value) =>
  value === null || value === undefined
    ? "–"
    : value < 0.001
      ? value > 0
        ? "< 1 ms"
        : "0 ms"
      : value < 1
        ? `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`
        : value < 100
          ? `${value.toFixed(1)} s`
          : `${Math.round(value / 60)} min`;
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const moment = (time) =>
  time ? new Date(time * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }) : "";

// ── the address ─────────────────────────────────────────────────────────────────────────────────────────────────────
// An address may be typed or cut off: a part that cannot be read is kept as it is, and named.
function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  let unread = null;
  const read = (part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      unread ??= part;
      return part;
    }
  };
  const parts = path.split("/").filter(Boolean).map(read);
  return { parts, given: Object.fromEntries(new URLSearchParams(query || "")), unread };
}
function link(parts, given = {}) {
  const kept = Object.entries(given).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return "#/" + parts.map(encodeURIComponent).join("/") + (kept.length ? "?" + new URLSearchParams(kept) : "");
}
const go = (address, replace = false) => (replace ? location.replace(address) : (location.hash = address));

async function ask(what, given = {}) {
  const asked = Object.entries(given).filter(([, value]) => value !== null && value !== undefined);
  const response = await fetch(`api/${what}?${new URLSearchParams(asked)}`);
  const answer = await response.json().catch(() => ({ error: `the viewer answered ${response.status}` }));
  if (!response.ok) throw new Error(answer.error || `the viewer answered ${response.status}`);
  return answer;
}

// ── charts ──────────────────────────────────────────────────────────────────────────────────────────────────────────
function chart(name, curves) {
  // curves: [[run, colour, [[step, value], …]], …]
  const width = 360,
    height = 132,
    left = 44,
    right = 6,
    top = 10,
    bottom = 18;
  const points = curves.flatMap(([, , curve]) => curve);
  const xs = points.map(([x]) => x),
    ys = points.map(([, y]) => y);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = [Math.min(...ys), Math.max(...ys)];
  if (y0 === y1) {
    const pad = Math.abs(y0) * 0.1 || 1;
    y1 += pad;
    if (y0 !== 0) y0 -= pad;
  }
  const ticks = Math.abs(y1 - y0) < 0.02 ? 4 : 2; // enough digits to tell the two ends apart
  const px = (x) => left + (x1 > x0 ? ((x - x0) / (x1 - x0)) * (width - left - right) : 0);
  const py = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - bottom - top);
  const told = h("span", {}, lastOf(curves));
  const cross = s("g", { visibility: "hidden" });
  const drawn = curves.map(([, colour, curve]) =>
    curve.length === 1
      ? s("circle", { cx: px(curve[0][0]), cy: py(curve[0][1]), r: 3, class: "b" + colour })
      : s("path", {
          class: "curve k" + colour,
          d: "M" + curve.map(([x, y]) => `${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("L"),
        }),
  );
  const figure = s(
    "svg",
    {
      viewBox: `0 0 ${width} ${height}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": `${plain(name)}: ${curves.map(describeCurve).join(", ")}`,
    },
    [
      s("path", {
        class: "grid",
        d: `M${left} ${py(y1)}H${width - right}M${left} ${py((y0 + y1) / 2)}H${width - right}`,
      }),
      s("path", { class: "axis", d: `M${left} ${height - bottom}H${width - right}` }),
      s("text", { class: "tick", x: left - 6, y: py(y1) + 4, "text-anchor": "end" }, num(y1, ticks)),
      s("text", { class: "tick", x: left - 6, y: py(y0), "text-anchor": "end" }, num(y0, ticks)),
      s("text", { class: "tick", x: left, y: height - 4 }, x0),
      s("text", { class: "tick", x: width - right, y: height - 4, "text-anchor": "end" }, x1),
      drawn,
      cross,
    ],
  );
  const shown = h("figure", { class: "chart", style: { margin: 0 }, tabindex: 0 }, [
    h("h3", {}, h("b", {}, visible(name)), told),
    figure,
  ]);
  shown.drawn = JSON.stringify([name, curves]);
  shown.point = (clientX) => {
    const box = figure.getBoundingClientRect();
    shown.pointedAt = clientX;
    const x = x0 + ((((clientX - box.left) / box.width) * width - left) / (width - left - right)) * (x1 - x0);
    const near = curves.map(([run, colour, curve]) => [
      run,
      colour,
      curve.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best)),
    ]);
    cross.replaceChildren(
      s("path", { class: "cross", d: `M${px(near[0][2][0])} ${top}V${height - bottom}` }),
      ...near.map(([, colour, [step, value]]) =>
        s("circle", { class: `dot b${colour}`, cx: px(step), cy: py(value), r: 3.5 }),
      ),
    );
    cross.setAttribute("visibility", "visible");
    shown.step = near[0][2][0];
    told.textContent = `step ${near[0][2][0]}: ${near.map(([, , point]) => num(point[1])).join(" · ")}`;
  };
  // A point leads to its step: by a click, or with the arrow keys and Enter.
  const all = [...new Set(xs)].sort((a, b) => a - b);
  const open = () => shown.step > 0 && go(link(["run", run(), "step", shown.step]));
  figure.addEventListener("pointermove", (event) => shown.point(event.clientX));
  figure.addEventListener("click", open);
  shown.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (move) {
      const box = figure.getBoundingClientRect(),
        at = all.indexOf(shown.step),
        next = all[Math.max(0, Math.min(all.length - 1, at < 0 ? all.length - 1 : at + move))];
      shown.point(box.left + (px(next) / width) * box.width);
    } else if (event.key === "Enter") open();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  figure.addEventListener("pointerleave", () => {
    delete shown.pointedAt;
    cross.setAttribute("visibility", "hidden");
    told.textContent = lastOf(curves);
  });
  return shown;
}
const describeCurve = ([run, , curve]) => `${plain(run)} from ${num(curve[0][1])} to ${num(curve.at(-1)[1])}`;
const lastOf = (curves) => curves.map(([, , curve]) => num(curve.at(-1)[1])).join(" · ");

const DEFAULTS = [
  "reward/mean",
  "validation/success",
  "sft/loss",
  "validation/loss",
  "validation/perplexity",
  "response_length/mean",
  "actor/entropy",
  "actor/grad_norm",
  "rollout_corr/k3_kl",
  "rollout/truncated",
  "batch/no_signal",
  "staleness/max",
  "rollout/tokens_per_s",
  "seconds/rollout",
  "seconds/train",
];

// ── screens ─────────────────────────────────────────────────────────────────────────────────────────────────────────
let runs = [];
const run = () => place().parts[1];

async function showRuns() {
  runs = await ask("runs");
  if (runs.length === 1) return go(link(["run", runs[0].name]), true);
  const rows = runs.map((item) =>
    h("tr", { "data-href": link(["run", item.name]) }, [
      h("td", {}, h("a", { href: link(["run", item.name]) }, visible(item.name))),
      h("td", {}, [
        item.problem
          ? h("span", { class: "tag bad" }, "cannot be read")
          : h("span", { class: "tag" }, item.pulse.status),
      ]),
      h("td", { class: "num" }, item.pulse ? num(item.pulse.trajectories) : ""),
      h("td", { class: "soft mono" }, visible(item.problem || item.dir)),
    ]),
  );
  return [h("h1", {}, "Runs"), table(["run", "status", "#trajectories", "directory"], rows)];
}

function table(heads, rows, label) {
  return h("table", { "aria-label": label || null }, [
    h("thead", {}, [
      h("tr", {}, [
        heads.map((head) =>
          h("th", { scope: "col", class: head.startsWith("#") ? "num" : null }, head.replace("#", "")),
        ),
      ]),
    ]),
    h("tbody", {}, rows),
  ]);
}

function facts(pairs) {
  return h("dl", { class: "facts" }, [
    pairs.filter(Boolean).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  ]);
}

// Counting how sessions ended takes long in a long run: facts and curves are painted without it, and it goes on after.
// A live update brings all at once, so that nothing moves.
async function showRun(name, given, { mine, live }) {
  const shown = runs.filter((item) => !item.problem).map((item) => item.name);
  const beside = shown.filter((other) => other !== name);
  const chosen = given.with ? given.with.split("\n").filter((other) => shown.includes(other)) : beside;
  const order = [name, ...chosen],
    asked = given.m ? given.m.split(",") : DEFAULTS;
  const [about, ends, waits, ...metrics] = await Promise.all([
    ask("overview", { run: name }),
    live ? ask("ends", { run: name }) : null,
    live ? ask("waits", { run: name }) : null,
    ...order.map((other) => ask("metrics", { run: other, names: asked.join(",") })),
  ]);
  const [listed] = metrics;
  const wanted = given.m ? asked : asked.filter((metric) => metric in listed.names);
  const panels = curvePanels(order, wanted, metrics);
  followEnds(name, mine, ends);
  if (!waits) followWaits(name, mine);
  return [
    h("h1", {}, visible(name)),
    h("p", { class: "lede" }, visible(about.dir), about.cause ? [" · ", visible(about.cause)] : ""),
    runFacts(about),
    h("p", {}, [
      h("a", { href: link(["run", name, "findings"]) }, "Findings"),
      h("span", { class: "soft" }, ": groups without signal, answers that repeat, rewards that may be gamed"),
    ]),
    h("h2", {}, "Curves ", h("small", {}, "over training steps; move over one to read it, click to open the step")),
    beside.length > 0 && legend(name, beside, chosen, given),
    panels.length ? h("div", { class: "charts" }, panels) : noCurves(name, about),
    Object.keys(listed.names).length > 0 && metricPicker(name, listed.names, wanted, given),
    h("div", { class: "two" }, endsPanel(name, ends), waitsPanel(waits)),
    about.events.length > 0 && notable(about.events),
    about.steps.length > 0 && [
      h("h2", {}, "Timeline ", h("small", {}, "what sampled, trained and waited, and when")),
      timelinePicture(name),
    ],
  ];
}

const colourOf = (other) => 1 + (runs.findIndex((item) => item.name === other) % 6);

// A chart for each metric that any of the runs has, with a curve of each run that has it.
function curvePanels(order, wanted, metrics) {
  const curves = (metric) => order.map((other, at) => [other, colourOf(other), metrics[at].curves[metric] || []]);
  return wanted
    .map((metric) => [metric, curves(metric).filter(([, , curve]) => curve.length)])
    .filter(([, found]) => found.length)
    .map(([metric, found]) => chart(metric, found));
}

const runFacts = (about) =>
  facts([
    ["status", about.status],
    ["steps", about.steps.length ? `${about.steps[0]} – ${about.steps[1]}` : "none"],
    ["validations", num(about.validations.length)],
    ["trajectories", num(about.trajectories)],
    about.starts.length > 1 && ["starts", num(about.starts.length)],
    about.starts.length && ["began", moment(about.starts[0].at)],
  ]);

// Runs in the curves: others than the one on the screen are switched off and on.
function legend(name, beside, chosen, given) {
  const swatch = (other) => h("i", { class: "b" + colourOf(other) });
  const toggled = (other) =>
    (chosen.includes(other) ? chosen.filter((one) => one !== other) : [...chosen, other]).join("\n") || "-";
  const toggle = (other) => {
    const attributes = {
      href: link(["run", name], { ...given, with: toggled(other) }),
      role: "switch",
      "aria-checked": String(chosen.includes(other)),
      class: chosen.includes(other) ? null : "off",
    };
    return h("a", attributes, swatch(other), visible(other));
  };
  return h("div", { class: "legend", role: "group", "aria-label": "Runs in the curves" }, [
    h("span", {}, swatch(name), visible(name)),
    beside.map(toggle),
  ]);
}

const noCurves = (name, about) =>
  h("p", { class: "empty" }, [
    about.status === "running"
      ? "No metrics yet: they come with the first training step. Until then, see "
      : "No training step was recorded, so there are no curves. A rollout that stands alone has none; see ",
    h("a", { href: link(["run", name, "tasks"]) }, "its tasks"),
    ".",
  ]);

function metricPicker(name, listed, wanted, given) {
  const add = ({ target }) => {
    const isKnown = [...target.list.options].some((option) => option.value === target.value);
    if (isKnown) go(link(["run", name], { ...given, m: [...new Set([...wanted, target.value])].join(",") }));
  };
  const option = (metric) => h("option", { value: metric, label: plain(metric) === metric ? null : plain(metric) });
  return h("p", { style: { marginTop: "18px" } }, [
    h("input", { list: "metric-names", placeholder: "add a metric…", "aria-label": "Add a metric", onchange: add }),
    " ",
    given.m && h("a", { href: link(["run", name], { ...given, m: null }) }, "as at first"),
    h("datalist", { id: "metric-names" }, Object.keys(listed).map(option)),
  ]);
}

function notable(events) {
  const line = (event) =>
    h("tr", {}, [
      h("td", { class: "soft" }, moment(event.time)),
      h("td", {}, visible(event.kind)),
      h("td", {}, describeEvent(event)),
    ]);
  const told = "stalls, tasks that were taken out, records that were dropped; the newest first";
  return [
    h("h2", {}, "What was notable ", h("small", {}, told)),
    table(["when", "what", "details"], events.slice(0, 12).map(line)),
  ];
}

// The first picture of a long run is of its newest part; the next ones hold more, until all was read.
function timelinePicture(name) {
  const address = (part) => {
    const given = { run: name, at: pulse?.[name]?.metrics ?? "", ...(part ? { part } : {}) };
    return `api/timeline?${new URLSearchParams(given)}`;
  };
  let part = 0;
  const goOn = async () => {
    const { share } = await ask("timeline_read", { run: name }).catch(() => ({ share: 1 }));
    if (share < 1 && picture.isConnected) picture.src = address(++part);
  };
  const picture = h("img", {
    class: "timeline",
    alt: "Timeline of the run: open sessions, training, waits, weight updates, validations",
    src: address(part),
    onload: goOn,
    onerror: (event) => event.target.replaceWith(h("p", { class: "soft" }, "There is no timeline yet.")),
  });
  return picture;
}

// Fields of a notable event in words, the name before the value.
const describeEvent = (event) =>
  Object.entries(event.fields).map(([name, value], at) => [
    at ? ", " : "",
    h("span", { class: "soft" }, visible(name.replace(/_s$/, "").replaceAll("_", " "))),
    " ",
    name.endsWith("_s") && typeof value === "number"
      ? seconds(value)
      : visible(typeof value === "string" ? value : JSON.stringify(value)),
  ]);

function bars(rows, bad = () => false) {
  const most = Math.max(...rows.map(([, count]) => count), 1e-9);
  return h("div", { class: "bars" }, [
    rows.map(([label, count, shown, href]) => [
      href ? h("a", { href }, label) : h("span", {}, label),
      h("span", { class: "track", "aria-hidden": "true" }, [
        h("i", { class: bad(label) ? "bad" : null, style: { width: `${(count / most) * 100}%` } }),
      ]),
      h("span", { class: "num" }, shown ?? num(count)),
    ]),
  ]);
}

const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

// Brings a part of the screen up to date, as long as it is the screen that asked for it.
function replacePart(id, mine, fresh) {
  const old = document.getElementById(id);
  if (old && mine === turn) patch(old, fresh);
}

async function followEnds(name, mine, ends) {
  try {
    while (mine === turn && (!ends || ends.counted < ends.trajectories)) {
      if (ends) await pause(200);
      ends = await ask("ends", { run: name });
      replacePart("ends", mine, endsPanel(name, ends));
    }
  } catch (error) {
    replacePart("ends", mine, problemPart("ends", error));
  }
}

async function followWaits(name, mine) {
  try {
    replacePart("waits", mine, waitsPanel(await ask("waits", { run: name })));
  } catch (error) {
    replacePart("waits", mine, problemPart("waits", error));
  }
}

const problemPart = (id, error) => h("section", { id }, h("p", { class: "problem" }, visible(error.message)));

function endsPanel(name, about) {
  const title = (partial) =>
    h("h2", {}, "How sessions ended ", h("small", {}, "stop reasons, every attempt" + partial));
  if (!about)
    return h("section", { id: "ends", "aria-busy": "true" }, [title(""), h("p", { class: "soft" }, "Counting them…")]);
  const by = (key, kept) =>
    Object.entries(
      about.ends
        .filter(kept)
        .reduce((sums, item) => ({ ...sums, [item[key]]: (sums[item[key]] || 0) + item.count }), {}),
    ).sort((a, b) => b[1] - a[1]);
  const failed = by("boundary", (item) => item.boundary);
  const partial = about.counted < about.trajectories ? ` (${num(about.counted)} counted so far)` : "";
  return h("section", { id: "ends" }, [
    title(partial),
    about.ends.length
      ? bars(
          by("reason", () => true).map(([reason, count]) => [
            reason,
            count,
            null,
            link(["run", name, "find"], { reason }),
          ]),
        )
      : h("p", { class: "soft" }, "No session has ended yet."),
    h("h2", {}, "Failures ", h("small", {}, "by the boundary where they happened")),
    failed.length
      ? bars(
          failed.map(([boundary, count]) => [boundary, count, null, link(["run", name, "find"], { boundary })]),
          () => true,
        )
      : h("p", { class: "soft" }, "None."),
  ]);
}

function waitsPanel(found) {
  if (!found) return h("section", { id: "waits", "aria-busy": "true" });
  const { spans, steps } = found;
  const { validation = 0, validating = 0 } = spans;
  const same = Math.abs(validation - validating) < 0.02 * validating; // the trainer waited for all of it
  const means = Object.entries(spans)
    .filter(([kind]) => kind !== "validating" || !same)
    .sort((a, b) => b[1] - a[1]);
  if (!means.length) return h("section", { id: "waits" });
  const words = {
    rollout: "trainer waits for samples",
    train: "training",
    weights: "weights on their way",
    validation: "trainer waits for validation",
    validating: "validation",
    checkpoint: "checkpoint",
  };
  return h("section", { id: "waits" }, [
    h("h2", {}, [
      "Where the time goes ",
      h("small", {}, `seconds of a step, on average over all ${plural(steps, "step")}`),
    ]),
    bars(means.map(([span, value]) => [words[span] || span, value, seconds(value)])),
  ]);
}

async function showSteps(name, given) {
  const { steps, more } = await ask("steps", { run: name, before: given.before });
  const about = await ask("overview", { run: name });
  const href = (step) => link(["run", name, "step", step.step]);
  const most = Math.max(1, ...steps.map((step) => step.reward ?? 0));
  const bar = (step) =>
    h("span", { class: "rewardbar", "aria-hidden": "true" }, [
      h("i", { class: "b1", style: { width: `${(Math.max(0, step.reward ?? 0) / most) * 100}%` } }),
    ]);
  const columns = [
    ["step", (step) => h("a", { href: href(step) }, step.step)],
    ["#reward", (step) => fixed(step.reward), "reward"],
    ["#std", (step) => fixed(step.spread), "spread"],
    ["", bar, "reward"],
    ["#loss", (step) => fixed(step.loss, 4), "loss"],
    ["#tokens", (step) => fixed(step.length, 1), "length"],
    ["#groups", (step) => num(step.groups), "groups"],
    ["#no signal", (step) => num(step.no_signal), "no_signal"],
    ["#failed", (step) => (step.failed ? h("span", { class: "tag bad" }, num(step.failed)) : "0"), "failed"],
    ["#cut", (step) => (step.truncated === null ? "–" : `${Math.round(step.truncated * 100)}%`), "truncated"],
    ["#staleness", (step) => num(step.staleness), "staleness"],
    ["#rollout", (step) => seconds(step.rollout_s), "rollout_s"],
    ["#train", (step) => seconds(step.train_s), "train_s"],
    [
      "#validation",
      (step) =>
        step.validation === null
          ? ""
          : h("a", { href: link(["run", name, "validation", step.step]) }, fixed(step.validation)),
      "validation",
    ],
    [
      "#validation loss",
      (step) => (step.validation_loss === null ? "" : fixed(step.validation_loss, 4)),
      "validation_loss",
    ],
  ].filter(([, , key]) => !key || steps.some((step) => (key === "groups" ? step.groups > 0 : step[key] !== null)));
  const rows = steps.map((step) =>
    h("tr", { "data-href": href(step) }, [
      columns.map(([head, cell]) => h("td", { class: head.startsWith("#") ? "num" : null }, cell(step))),
    ]),
  );
  const noSteps = !steps.length;
  return [
    h("h1", {}, "Steps"),
    h("p", { class: "lede" }, [
      "What each step trained on, the newest first. Validations: ",
      about.validations.length
        ? about.validations.map((step, at) => [
            at ? ", " : "",
            h("a", { href: link(["run", name, "validation", step]) }, "after step " + step),
          ])
        : "none",
      ". ",
      h("a", { href: link(["run", name, "tasks"]) }, "All tasks"),
    ]),
    noSteps
      ? h("p", { class: "empty" }, [
          "No training step is recorded. ",
          h("a", { href: link(["run", name, "tasks"]) }, "All tasks of this run"),
        ])
      : h("div", { class: "wide-table" }, [
          table(
            columns.map(([head]) => head),
            rows,
            "Training steps",
          ),
        ]),
    more &&
      h("p", { class: "more" }, [
        h("a", { href: link(["run", name, "steps"], { before: steps.at(-1).step }) }, "Earlier steps"),
      ]),
  ];
}

const level = (reward, low, high) =>
  reward === null ? "none" : high > low ? "r" + Math.min(4, Math.floor(((reward - low) / (high - low)) * 4.999)) : "r2";

function cells(name, samples, here) {
  const rewards = samples.map((item) => item.reward).filter((value) => value !== null);
  const [low, high] = [Math.min(0, ...rewards), Math.max(1, ...rewards)];
  const cell = (item) => {
    const failed = item.status === "failed";
    const told = failed ? "failed" : "reward " + num(item.reward);
    const attributes = {
      class: `cell ${failed ? "fail" : level(item.reward, low, high)}${item.id === here ? " here" : ""}`,
      href: link(["run", name, "t", item.id, place().parts[4] || "transcript"], keepView()),
      ...names(item),
      title: `sample ${item.sample}: ${told}`,
      "aria-label": `sample ${item.sample}, ${told}`,
    };
    return h("a", attributes, failed ? "×" : "");
  };
  return h("span", { class: "cells" }, samples.map(cell));
}
// Which trajectory (and row) an element stands for: what `m` marks and `d` compares.
const names = (item, row = 0) => ({
  "data-t": `${item.id}/${row}`,
  "data-run": item.run,
  "data-name": plain(`${item.uid}/${item.sample}`) + (row ? `, row ${row}` : ""),
});
// How a trajectory is looked at, kept from it to the next sample: a row of another sample is another row.
const keepView = () => {
  const { parts, given } = place();
  return parts[2] === "t" ? { by: given.by, as: given.as } : {};
};

function groupRow(name, group, step) {
  const lengths = group.samples.map((item) => item.tokens);
  const href = link(["run", name, "group"], { uid: group.uid, step });
  return h("tr", { "data-href": href, ...(group.samples.length ? names(group.samples[0]) : {}) }, [
    h("td", {}, [
      h("a", { href, class: "mono" }, [
        h("span", { class: "clip", style: { display: "inline-block", maxWidth: "30ch" } }, visible(group.uid)),
      ]),
    ]),
    h("td", {}, h("div", { class: "clip soft", dir: "auto" }, visible(group.asked))),
    h("td", {}, cells(name, group.samples)),
    h("td", { class: "num" }, fixed(group.mean)),
    h("td", { class: "num" }, [
      group.spread === 0
        ? h("span", { class: "tag", title: "all samples have the same reward: nothing is learned from them" }, "none")
        : fixed(group.spread),
    ]),
    h("td", { class: "num soft" }, [
      lengths.length
        ? Math.min(...lengths) === Math.max(...lengths)
          ? num(lengths[0])
          : `${num(Math.min(...lengths))} – ${num(Math.max(...lengths))}`
        : "",
    ]),
  ]);
}

// A long list: the next page is asked for when its end comes near, and each page is a body of the table of its own. A
// page far from sight becomes a gap of its height, and is asked for again when it comes near: nodes stay few.
const NEAR = "3000px";
let lists = 0;

function endless(shown, load, first, next) {
  const more = h("p", { class: "more", role: "status" });
  const near = new IntersectionObserver(followPages, { rootMargin: `${NEAR} 0px` });
  const append = async () => {
    const after = next;
    more.textContent = "…";
    try {
      const [rows, following] = await load(after);
      const page = h("tbody", {}, rows);
      more.previousElementSibling.append(page);
      watchPage(page, near, load, after);
      next = following;
      more.textContent = next === null ? "" : "…";
    } catch (error) {
      more.textContent = error.message;
      next = null;
    }
    end.unobserve(more); // who has scrolled on by now is at the end still: that is no change, and would not be told
    if (next !== null) end.observe(more);
  };
  let busy = null;
  more.load = () => (busy ??= (next === null ? Promise.resolve() : append()).finally(() => (busy = null)));
  const end = new IntersectionObserver(([entry]) => entry.isIntersecting && more.load(), { rootMargin: "600px" });
  if (next !== null) end.observe(more);
  watchPage(shown.tBodies[0], near, load, first);
  more.dataset.more = "1";
  more.drawn = ++lists; // never patched: it belongs to the list that it was made for
  return more;
}

function watchPage(page, near, load, after) {
  page.reload = async () => page.replaceChildren(...(await load(after))[0]);
  near.observe(page);
}

function followPages(entries) {
  for (const { target: page, isIntersecting } of entries) {
    page.isNear = isIntersecting;
    if (isIntersecting) showPage(page).then(() => page.isNear || hidePage(page));
    else hidePage(page);
  }
}

const isGap = (page) => page.firstElementChild?.classList.contains("gap");

// What is chosen, has the focus or is selected stays.
function hidePage(page) {
  const held = page.contains(document.activeElement) || page.contains(getSelection().anchorNode);
  if (held || isGap(page) || page.querySelector(".at")) return;
  const columns = page.parentNode.tHead.rows[0].cells.length;
  const height = `${page.getBoundingClientRect().height}px`;
  const cell = h("td", { colspan: columns, style: { height } });
  page.replaceChildren(h("tr", { class: "gap", "aria-hidden": "true" }, cell));
}

async function showPage(page) {
  if (isGap(page)) await (page.busy ??= page.reload().catch(() => null)); // stays a gap where it fails
  page.busy = null;
}

let shownEvent = null; // of the step on the screen
const stepWasUndone = async (name) =>
  (await ask("groups", { run: name, step: place().parts[3], after: 1e9 }).catch(() => ({}))).event !== shownEvent;

async function showGroups(name, given, which) {
  const load = async (after) => {
    const page = await ask("groups", { run: name, ...which, after });
    shownEvent = page.event;
    return [page.groups.map((group) => groupRow(name, group, which.step)), page.next, page.total, page.around || []];
  };
  const first = given.after || "";
  const [rows, next, total, near] = await load(first);
  const title =
    which.step !== undefined
      ? `Step ${which.step}`
      : which.validation !== undefined
        ? `Validation after step ${which.validation}`
        : "Tasks";
  const shown = table(["task", "question", "samples", "#mean reward", "#spread", "#sampled tokens"], rows, "Groups");
  const around = h("span", { class: "soft" }, [
    [
      ["[", "previous"],
      ["]", "next"],
    ].map(
      ([pressed, label], at) =>
        near[at] !== null &&
        near[at] !== undefined && [
          " · ",
          h("a", { "data-key": pressed, href: link(["run", name, "step", near[at]]) }, label),
        ],
    ),
  ]);
  return [
    h("h1", {}, title, " ", h("small", {}, total ? plural(total, "group") : "", around)),
    rows.length > 0 &&
      h("p", { class: "lede" }, [
        "One row for each task; a square is a sample, blue and full for the highest rewards, orange and low for the ",
        "lowest, × for one that failed.",
      ]),
    rows.length
      ? [shown, endless(shown, load, first, next)]
      : h("p", { class: "empty" }, [
          total === 0
            ? "This step trained on no recorded groups: supervised fine-tuning has rows and no trajectories."
            : "There is nothing here yet.",
        ]),
  ];
}

async function showGroup(name, given) {
  const group = await ask("group", { run: name, uid: given.uid, step: given.step });
  const scored = group.samples.filter((item) => item.reward !== null).sort((a, b) => a.reward - b.reward);
  const [worst, best] = [scored[0], scored.at(-1)];
  const compare =
    worst &&
    worst.id !== best.id &&
    h("a", { "data-key": "d", href: link(["run", name, "diff"], { id: worst.id, other: best.id }) }, [
      h("button", { type: "button", tabindex: -1 }, "Compare worst and best ", h("kbd", {}, "d")),
    ]);
  const place =
    group.step !== null
      ? ["step", group.step]
      : group.validation !== null
        ? ["validation", group.validation]
        : ["tasks"];
  const where = h("a", { "data-key": "u", href: link(["run", name, ...place]) }, when(group));
  const longest = Math.max(...group.samples.map((item) => item.tokens), 1);
  const parts = [...new Set(group.samples.flatMap((item) => Object.keys(item.parts)))];
  return [
    h("h1", { class: "name" }, [
      visible(group.uid),
      " ",
      h("small", {}, where, ", ", plural(group.samples.length, "sample")),
    ]),
    group.task && taskText(group.task),
    h("div", { class: "tools", style: { marginTop: "16px" } }, [
      compare,
      h("span", { class: "soft" }, rewardSpread(scored)),
      h("span", { style: { marginLeft: "auto" } }, exportLinks(name, { uid: group.uid })),
    ]),
    h(
      "div",
      { class: "samples", "data-list": "1" },
      group.samples.map((item) => sampleCard(name, item, parts, longest)),
    ),
    group.elsewhere.length > 0 && elsewhere(name, group),
  ];
}

const textOf = (value) => visible(typeof value === "string" ? value : JSON.stringify(value));

// What a task asks, and its ground truth.
function taskText(task) {
  const part = (role, label, text) =>
    h("div", { class: `message ${["user", "system"].includes(role) ? role : ""}` }, [
      h("div", { class: "role" }, h("b", {}, label)),
      h("div", { class: "text", dir: "auto" }, textOf(text)),
    ]);
  return [
    task.problem && h("p", { class: "problem" }, task.problem),
    (task.messages || []).map((message) => part(message.role, visible(message.role), message.content)),
    (task.ground_truth ?? null) !== null && part("", "ground truth", task.ground_truth),
  ];
}

// A sample beside the others of its task; bars of length are of the longest one.
function sampleCard(name, item, parts, longest) {
  const href = link(["run", name, "t", item.id, "transcript"]);
  const line = (label, value) => [h("span", {}, label), h("b", {}, value)];
  const width = `${(item.tokens / longest) * 100}%`;
  const silent = item.has_body ? "(said nothing)" : "(its messages were dropped to keep the journal small)";
  return h("article", { "data-href": href, ...names(item) }, [
    h("h3", {}, h("a", { href }, "sample " + item.sample), outcomeTag(item)),
    h("div", { class: "big" }, item.status === "failed" ? "failed" : num(item.reward)),
    h("div", { class: "kv" }, [
      parts.map((part) => line(visible(part), num(item.parts[part] ?? null))),
      line("tokens", num(item.tokens)),
      h("span", { class: "track", "aria-hidden": "true" }, h("i", { class: "b1", style: { width } })),
      line("turns", num(item.turns)),
      line("seconds", seconds(item.seconds.total)),
    ]),
    h("div", { class: "said", dir: "auto" }, visible(item.status === "failed" ? item.detail : item.said || silent)),
  ]);
}

function elsewhere(name, group) {
  const one = (other, at) => [
    at ? " · " : "",
    h("a", { href: link(["run", name, "group"], { uid: other.uid, step: other.step }) }, when(other)),
    " (",
    h("a", { href: link(["run", name, "diff"], { id: other.id, other: group.samples[0].id }) }, "compare"),
    ")",
  ];
  return [h("h2", {}, "The same task at other steps"), h("p", {}, group.elsewhere.map(one))];
}

const rewardSpread = (scored) =>
  scored.length < 2
    ? ""
    : scored[0].reward === scored.at(-1).reward
      ? `all rewards are ${num(scored[0].reward)}: no signal`
      : `rewards from ${num(scored[0].reward)} to ${num(scored.at(-1).reward)}`;
const outcomeTag = (item) =>
  h("span", { class: "tag " + (item.status === "failed" ? "bad" : "") }, [
    item.status === "failed" ? item.boundary || "failed" : item.reason,
  ]);
const exportLinks = (name, which) => [
  h("a", { class: "soft", href: `api/export?${new URLSearchParams({ run: name, ...which })}`, download: "" }, [
    "export HTML",
  ]),
  " ",
  h(
    "a",
    { class: "soft", href: `api/export?${new URLSearchParams({ run: name, form: "jsonl", ...which })}`, download: "" },
    ["JSONL"],
  ),
];

// ── one trajectory ──────────────────────────────────────────────────────────────────────────────────────────────────
const TABS = ["transcript", "tokens", "time", "tree"];

async function showTrajectory(name, id, tab, given) {
  const item = await ask("trajectory", { run: name, id });
  const row = Number(given.row || 0);
  const content = { transcript: showTranscript, tokens: showTokens, time: showTime, tree: showTree }[tab];
  const group = link(["run", name, "group"], { uid: item.uid, step: item.step });
  const up = { href: group, "data-key": "u", style: { textDecoration: "none" } };
  return [
    h("h1", names(item, row), [
      h("a", up, visible(item.uid)),
      h("span", { class: "faint" }, " / " + item.sample),
      " ",
      h("small", {}, when(item), item.attempt ? `, attempt ${item.attempt + 1}` : ""),
    ]),
    h("div", { class: "tools" }, [
      cells(name, item.siblings, item.id),
      siblingOf(name, item, -1, tab),
      siblingOf(name, item, 1, tab),
      item.has_body && comparisons(name, item, row),
      h("span", { style: { marginLeft: "auto" } }, exportLinks(name, { id: item.id })),
    ]),
    trajectoryFacts(item),
    item.detail && h("p", { class: "problem", dir: "auto" }, visible(item.detail)),
    !item.intact && h("p", { class: "problem" }, "This record is not as it was written: the journal is damaged."),
    !item.has_body &&
      h("p", { class: "problem" }, [
        "Its tokens and messages were dropped to keep the journal within logging.journal_max_mb.",
      ]),
    tabs(name, id, tab, { row: row || null, by: given.by, as: given.as }),
    item.has_body && (await content(name, item, given)),
  ];
}

function siblingOf(name, item, offset, tab) {
  const at = item.siblings.findIndex((other) => other.id === item.id);
  const other = at >= 0 && item.siblings[at + offset];
  if (!other) return null;
  const href = link(["run", name, "t", other.id, tab], keepView());
  return h("a", { class: "soft", "data-key": offset < 0 ? "[" : "]", href }, offset < 0 ? "previous" : "next");
}

// With the sample of the task whose reward differs most, or with any other.
function comparisons(name, item, row) {
  const far = (other) => Math.abs(other.reward - (item.reward ?? 0));
  const others = item.siblings.filter((other) => other.id !== item.id && other.reward !== null);
  const rival = others.sort((a, b) => far(b) - far(a))[0];
  const any = link(["run", name, "diff"], { id: item.id, row: row || null });
  return [
    rival &&
      h("a", { "data-key": "d", href: link(["run", name, "diff"], { id: item.id, other: rival.id }) }, [
        h("button", { type: "button", tabindex: -1 }, `Compare with sample ${rival.sample} `, h("kbd", {}, "d")),
      ]),
    h("a", { "data-key": "D", class: "soft", href: any }, [
      rival ? "with another… " : "Compare with… ",
      h("kbd", {}, "D"),
    ]),
  ];
}

const trajectoryFacts = (item) =>
  facts([
    ["reward", item.status === "failed" ? "failed" : num(item.reward)],
    ...Object.entries(item.parts).map(([part, value]) => [visible(part), num(value)]),
    ["ended by", item.boundary || item.reason],
    ["sampled tokens", num(item.tokens)],
    ["turns", num(item.turns)],
    item.rows > 1 && ["rows", num(item.rows)],
    ["time", seconds(item.seconds.total)],
  ]);

function tabs(name, id, tab, kept) {
  const one = (other, index) => {
    const attributes = {
      "aria-current": other === tab ? "page" : null,
      href: link(["run", name, "t", id, other], kept),
      "data-key": String(index + 1),
    };
    return h("a", attributes, other[0].toUpperCase() + other.slice(1), h("kbd", {}, index + 1));
  };
  return h("nav", { class: "tabs", "aria-label": "Views of this trajectory" }, TABS.map(one));
}

// Spans count letters (code points), as findings do; half of a pair counts as one, as in Python.
const span = (given) => {
  const found = /^(\d+)-(\d+)$/.exec(given || "");
  return found ? [Number(found[1]), Number(found[2])] : [null, null];
};
function marked(text, from, to) {
  const letters = Array.from(text);
  return [
    visible(letters.slice(0, from).join("")),
    h("mark", {}, visible(letters.slice(from, to).join(""))),
    visible(letters.slice(to).join("")),
  ];
}

// Rows beside the main one (forks, sub-agents, conversations made shorter) have tokens and no messages: their text.
function otherRows(name, item) {
  return item.rows_shown.slice(1).map((row) => {
    const inside = h("div", {});
    const opened = h(
      "details",
      {
        class: "rowtext",
        ...names(item, row.position),
        ontoggle: async () => {
          if (!opened.open || inside.hasChildNodes()) return;
          const { pieces, cut } = await ask("row_text", { run: name, id: item.id, row: row.position }).catch(
            (error) => ({ pieces: [{ kind: error.message, text: "" }], cut: 0 }),
          );
          fill(inside, [
            pieces.map((piece) =>
              h("div", { class: "message " + (piece.kind === "sampled" ? "assistant" : "tool") }, [
                h("div", { class: "role" }, h("b", {}, visible(piece.kind))),
                h("div", { class: "text", dir: "auto" }, visible(piece.text)),
              ]),
            ),
            cut > 0 && h("p", { class: "soft" }, `… ${plural(cut, "more token")}`),
          ]);
        },
      },
      [
        h("summary", {}, [
          h("b", {}, `row ${row.position}`),
          " ",
          h("span", { class: "soft" }, [
            originOf(row),
            `, ${plural(row.turns.length, "turn")}, ${plural(row.sampled, "sampled token")}`,
          ]),
        ]),
        inside,
      ],
    );
    return opened;
  });
}
const originOf = (row) =>
  row.parent === null
    ? row.position
      ? "a beginning of its own: a sub-agent, or a conversation made shorter"
      : "the main one"
    : `forked from row ${row.parent} after ${plural(row.shared, "token")}`;

async function showTranscript(name, item, given) {
  const results = item.rows_shown.length ? item.rows_shown[0].turns.flatMap((turn) => turn.results || []) : [];
  const tools = item.messages.filter((message) => message.role === "tool").length;
  const turns = item.rows_shown.length ? item.rows_shown[0].turns : [];
  const said = item.messages.filter((message) => message.role === "assistant").length;
  let tool = 0,
    // Assistant messages before the first turn are the prompt's; of several rows the turns shown are the first row's.
    number = item.rows_shown.length === 1 ? Math.min(0, turns.length - said) : 0;
  const [from, to] = span(given.span),
    field = given.field || "content";
  const whole =
    from !== null && (await ask("message", { run: name, id: item.id, at: given.message, field }).catch(() => null));
  const show_ = (at, which, text) =>
    whole && String(at) === given.message && which === field ? marked(whole.text, from, to) : visible(text);
  return [
    h("section", { "aria-label": "Transcript" }, [
      item.messages.map((message, at) => {
        const result = message.role === "tool" && tools === results.length ? results[tool++] : null;
        const own = message.role === "assistant" ? turns[number++] : null;
        const text = h("div", { class: "text", dir: "auto" }, show_(at, "content", message.text));
        const known = ["user", "assistant", "tool", "system"].includes(message.role) ? message.role : "";
        return h("div", { class: "message " + known, id: "message-" + at, tabindex: -1 }, [
          h("div", { class: "role" }, [
            h("b", {}, visible(message.role)),
            message.name ? [visible(message.name), h("br")] : "",
            result && [
              h("span", { class: "tag " + (result.status === "ok" ? "" : "bad") }, result.status),
              " ",
              seconds(result.seconds),
              result.truncated ? " · cut" : "",
              result.reward !== undefined ? ` · reward ${num(result.reward)}` : "",
            ],
            own && [
              seconds(own.generate_s),
              own.reward !== undefined ? h("span", { class: "tag good" }, `reward ${num(own.reward)}`) : "",
            ],
          ]),
          h("div", {}, [
            message.thinks && h("div", { class: "text thinks", dir: "auto" }, show_(at, "reasoning", message.thinks)),
            text,
            message.cut > 0 &&
              !(whole && String(at) === given.message && field === "content") &&
              h(
                "button",
                {
                  type: "button",
                  onclick: async (event) => {
                    const whole = await ask("message", { run: name, id: item.id, at });
                    text.replaceChildren();
                    fill(text, [visible(whole.text)]);
                    event.target.remove();
                  },
                },
                [`Show ${message.cut.toLocaleString("en")} more letters`],
              ),
            message.calls.length === 0 &&
              own &&
              own.calls &&
              own.calls.map((call) =>
                h("div", { class: "call", dir: "auto" }, [
                  h("span", { class: "soft" }, call.problem ? "not read as a call: " : "calls "),
                  h("b", {}, visible(call.name)),
                  " ",
                  visible(call.problem || JSON.stringify(call.arguments)),
                ]),
              ),
            message.calls.map((call, place) =>
              h("div", { class: "call", dir: "auto" }, [
                h("b", {}, visible(call.name)),
                " ",
                show_(at, "call-" + place, call.arguments),
              ]),
            ),
          ]),
        ]);
      }),
    ]),
    otherRows(name, item),
    item.task &&
      item.task.ground_truth !== null &&
      item.task.ground_truth !== undefined &&
      h("div", { class: "message" }, [
        h("div", { class: "role" }, h("b", {}, "ground truth")),
        h("div", { class: "text", dir: "auto" }, [
          visible(
            typeof item.task.ground_truth === "string"
              ? item.task.ground_truth
              : JSON.stringify(item.task.ground_truth),
          ),
        ]),
      ]),
    ["score", "trajectory"].map(
      (kind) =>
        item.extra[kind] &&
        h("div", { class: "message" }, [
          h("div", { class: "role" }, h("b", {}, kind === "score" ? "reward extra" : "extra")),
          h("div", { class: "text", dir: "auto" }, visible(JSON.stringify(item.extra[kind], null, 2))),
        ]),
    ),
  ];
}

// How a token is coloured: by which numbers, into which class, and what the scale says. Scales are safe for readers who
// cannot tell red from green: one hue from light to dark, or blue against orange.
const steps = (value, limits) => limits.filter((limit) => value > limit).length;
const two = (value, limits) => {
  const size = steps(Math.abs(value), limits);
  return size === 0 ? "z0" : (value < 0 ? "p" : "n") + size;
};
const SIGNALS = {
  logprob: {
    of: (w, i) => w.logprobs[i],
    shade: (v) => "s" + steps(-v, [0.05, 0.3, 1, 2.5, 5]),
    scale: [["s0", "0, likely"], ["s1"], ["s2"], ["s3"], ["s4"], ["s5", "below −5, unlikely"]],
    told: "the sampler's logprob of each token",
  },
  gap: {
    of: (w, i) => gapOf(w, i),
    shade: (v) => two(v, [0.001, 0.02, 0.1, 0.5]),
    needs: "trainer",
    scale: [
      ["p4", "trainer lower by 0.5"],
      ["p3"],
      ["p2"],
      ["p1"],
      ["z0"],
      ["n1"],
      ["n2"],
      ["n3"],
      ["n4", "higher by 0.5"],
    ],
    told: "the trainer's logprob less the sampler's",
  },
  version: {
    of: (w, i) => (w.versions[i] < 0 ? null : w.versions[i]),
    shade: (v) => "v" + (1 + (v % 6)),
    scale: [],
    told: "the policy version that sampled each token",
  },
  advantage: {
    of: (w, i) => w.advantage && w.advantage[i],
    shade: (v) => two(v, [0.01, 0.3, 1, 2]),
    needs: "advantage",
    scale: [
      ["p4", "less of this"],
      ["p3"],
      ["p2"],
      ["p1"],
      ["z0", "0"],
      ["n1"],
      ["n2"],
      ["n3"],
      ["n4", "more of this"],
    ],
    told: "what the trainer learned from each token",
  },
  entropy: {
    of: (w, i) => w.entropy && w.entropy[i],
    shade: (v) => "s" + steps(v, [0.05, 0.3, 0.8, 1.5, 3]),
    needs: "entropy",
    scale: [["s0", "0, sure"], ["s1"], ["s2"], ["s3"], ["s4"], ["s5", "above 3, open"]],
    told: "how open the choice was, in nats",
  },
  weight: {
    of: (w, i) => w.weight && w.weight[i],
    shade: (v) => two(Math.log(Math.max(v, 1e-9)), [0.001, 0.05, 0.25, 0.7]),
    needs: "weight",
    scale: [["p4", "0.5"], ["p3"], ["p2"], ["p1"], ["z0", "1"], ["n1"], ["n2"], ["n3"], ["n4", "2"]],
    told: "the importance weight of each token",
  },
};
// Against the policy at the start of the step: later mini batches of a step have moved away from it on purpose.
const trainerOf = (w, i) => (w.old ? w.old[i] : w.trainer ? w.trainer[i] : null);
const gapOf = (w, i) => {
  const there = trainerOf(w, i);
  return there !== null && w.logprobs[i] !== null ? there - w.logprobs[i] : null;
};

function tokenSpan(w, i, signal, position) {
  const text = w.texts.length ? w.texts[i] : `[${w.ids[i]}]`;
  const value = w.mask[i] ? signal.of(w, i) : null;
  const raw = text === null;
  const flags = w.flags ? w.flags[i] : 0;
  const classes = [
    "tok",
    w.mask[i] ? "" : "given",
    raw ? "raw" : "",
    value === null || value === undefined ? "" : signal.shade(value),
    flags & 1 ? "clipped" : "",
    flags & 2 ? "left" : "",
    w.drift && w.drift[i] ? "drift" : "",
  ]
    .filter(Boolean)
    .join(" ");
  const shown = raw ? "⟨" + w.bytes[i] + "⟩" : text;
  const span = h("span", { class: classes, "data-at": position, tabindex: -1 });
  const lines = shown.split("\n");
  lines.forEach((line, at) => {
    fill(span, [visible(line)]);
    if (at < lines.length - 1) fill(span, [h("span", { class: "faint", "aria-hidden": "true" }, "↵"), "\n"]);
  });
  return span;
}

function tokenFlow(w, signal, first) {
  const flow = h("div", { class: "flow", role: "group", "aria-label": "Tokens", tabindex: 0 });
  const marks = new Map();
  if (w.start < w.prompt) marks.set(0, `prompt, ${plural(w.prompt, "token")}`);
  w.turns.forEach((turn, at) => {
    marks.set(
      w.prompt + turn.start,
      `turn ${at + 1}: ${plural(turn.sampled_end - turn.start, "sampled token")}, ${turn.stop}`,
    );
    if (turn.end > turn.sampled_end)
      marks.set(
        w.prompt + turn.sampled_end,
        `what turn ${at + 1} was answered, ${plural(turn.end - turn.sampled_end, "token")}`,
      );
  });
  w.ids.forEach((id, i) => {
    const position = w.start + i;
    if (marks.has(position)) flow.append(h("span", { class: "turnmark" }, marks.get(position)));
    const span = tokenSpan(w, i, signal, position);
    if (position === first) span.classList.add("first");
    flow.append(span);
  });
  return flow;
}

function describeToken(w, i) {
  const rows = [
    ["position", num(w.start + i)],
    ["id", w.ids[i]],
    ["sampled", w.mask[i] ? "yes" : "no"],
  ];
  if (w.mask[i]) {
    rows.push(
      ["version", w.versions[i]],
      ["sampler logprob", num(w.logprobs[i], 5)],
      ["probability", w.logprobs[i] === null ? "–" : num(Math.exp(w.logprobs[i]), 5)],
    );
    for (const [name, label] of [
      ["trainer", "trainer logprob"],
      ["old", "old logprob"],
      ["reference", "reference logprob"],
    ])
      if (w[name]) rows.push([label, num(w[name][i], 5)]);
    if (w.trainer) rows.push(["gap", num(gapOf(w, i), 6)]);
    for (const name of ["advantage", "entropy", "weight"]) if (w[name]) rows.push([name, num(w[name][i], 4)]);
    if (w.drift) rows.push(["encoded again", w.drift[i] ? "other tokens" : "the same"]);
    if (w.flags) rows.push(["in the loss", w.flags[i] & 2 ? "left out" : w.flags[i] & 1 ? "clipped" : "yes"]);
  }
  const raw = w.texts.length && w.texts[i] === null;
  return [
    h("div", { class: "piece", dir: "auto" }, [
      raw ? w.bytes[i] : w.texts.length ? visible(w.texts[i].replaceAll("\n", "↵").replaceAll(" ", "·")) : w.ids[i],
    ]),
    raw && h("p", { class: "soft" }, "Bytes of a character that other tokens complete."),
    h("dl", {}, [rows.map(([label, value]) => [h("dt", {}, label), h("dd", {}, value)])]),
  ];
}

async function showTokens(name, item, given) {
  const row = Number(given.row || 0);
  const by = given.by in SIGNALS ? given.by : "logprob";
  const [w, strip] = await Promise.all([
    ask("tokens", { run: name, id: item.id, row, start: given.start || 0 }),
    ask("strip", { run: name, id: item.id, row }),
  ]);
  const { as, start, sort, mark, tok } = given;
  const kept = { row: row || null, by: given.by, start, as, sort, mark, tok };
  const address = (changed) => link(["run", name, "t", item.id, "tokens"], { ...kept, ...changed });
  const side = tokenSide(SIGNALS[by]);
  const shown = as === "table" ? tokenTable(w, given, address) : tokenFlow(w, SIGNALS[by]);
  markTokens(shown, given.mark);
  followTokens(shown, side, w, given, address);
  const drifted = (w.drift || []).reduce((sum, on) => sum + on, 0);
  const pager = tokenPager(w, address);
  return [
    h("div", { class: "tools" }, [
      h("span", { class: "soft" }, "colour by"),
      colourChooser(by, [w], "not recorded for this trajectory: treadle annotate computes it", address),
      formChooser(as || "text", address),
      item.rows_shown.length > 1 && rowChooser(item, row, address),
      signalScale(by, w),
    ]),
    w.problem && h("p", { class: "problem" }, visible(w.problem)),
    drifted > 0 &&
      h("p", { class: "soft", id: "drift" }, [
        `${plural(drifted, "sampled token")} of this window (dotted) would be other tokens if their text were encoded `,
        "again. Training takes the ids as they were sampled.",
      ]),
    !w.trainer && noTrainer(name, item),
    drawStrip(strip, w, by, (start) => go(address({ start: start || null }))),
    pager,
    h("div", { class: "tokenview" }, shown, side),
    pager && pager.cloneNode(true),
  ];
}

// The colours that tokens can have; those whose numbers none of the windows has are there, and say why they are off.
function colourChooser(by, windows, missing, address) {
  const button = ([key, signal]) => {
    const isMissing = signal.needs && !windows.some((w) => w[signal.needs]);
    const attributes = {
      type: "button",
      "aria-pressed": String(key === by),
      disabled: isMissing,
      title: isMissing ? missing : signal.told,
      onclick: () => go(address({ by: key })),
    };
    return h("button", attributes, key);
  };
  const attributes = { class: "seg", role: "group", "aria-label": "Colour tokens by" };
  return h("div", attributes, Object.entries(SIGNALS).map(button));
}

function formChooser(as, address) {
  const button = (form) => {
    const attributes = {
      type: "button",
      "aria-pressed": String(form === as),
      "data-key": form === as ? null : "v",
      title: form === "table" ? "key v: sampler and trainer beside each other" : "key v: as text",
      onclick: () => go(address({ as: form === "text" ? null : form })),
    };
    return h("button", attributes, form);
  };
  return h("div", { class: "seg", role: "group", "aria-label": "Show tokens as" }, ["text", "table"].map(button));
}

function rowChooser(item, row, address) {
  const rows = item.rows_shown;
  const to = (position) => address({ row: position || null, start: null, tok: null, mark: null });
  const kind = (one) => (one.position ? `(${one.parent === null ? "own beginning" : "fork"})` : "(main)");
  const option = (one) =>
    h("option", { value: one.position, selected: one.position === row }, `row ${one.position} ${kind(one)}`);
  const following = rows[(rows.findIndex((one) => one.position === row) + 1) % rows.length].position;
  return [
    h("select", { "aria-label": "Row", onchange: (event) => go(to(Number(event.target.value))) }, rows.map(option)),
    h("a", { class: "soft", "data-key": "r", href: to(following) }, "next row ", h("kbd", {}, "r")),
  ];
}

function signalScale(by, w) {
  const { scale } = SIGNALS[by];
  const step = ([shade, word], at) => {
    const told = word && h("span", {}, word);
    return [at === 0 && told, h("i", { class: shade, title: word || null }), at > 0 && told];
  };
  const versions = by === "version" ? [...new Set(w.versions.filter((version) => version >= 0))].slice(0, 12) : [];
  const version = (number) => [h("i", { class: "v" + (1 + (number % 6)) }), number];
  return h("span", { class: "scale" }, scale.map(step), versions.map(version));
}

// What is told of the token under the pointer or the arrow keys; first, what the colours are.
function tokenSide(signal) {
  const told = signal.told[0].toUpperCase() + signal.told.slice(1);
  return h("aside", { class: "side", "aria-live": "polite" }, [
    h("p", { class: "soft" }, told, ". Grey tokens were not sampled. Move over a token, or use the arrow keys."),
  ]);
}

function tokenPager(w, address) {
  const after = w.start + w.ids.length;
  if (w.start === 0 && after >= w.total) return null;
  const page = (pressed, start, label) =>
    h("a", { "data-key": pressed, class: "soft", href: address({ start: start || null, tok: null }) }, label);
  return h("p", { class: "tools" }, [
    w.start > 0 && page("p", Math.max(0, w.start - 1500), "previous tokens"),
    h("span", {}, `${num(w.start)} – ${num(after)} of ${num(w.total)}`),
    after < w.total && page("n", after, "next tokens"),
  ]);
}

function markTokens(shown, mark) {
  const [from, to] = span(mark);
  if (from === null) return;
  for (const token of shown.querySelectorAll("[data-at]"))
    token.classList.toggle("marked", token.dataset.at >= from && token.dataset.at < to);
}

// A token that was chosen, by a click or the arrow keys, is part of the address; one under the pointer is not.
function followTokens(shown, side, w, given, address) {
  const select = (token) => {
    shown.querySelectorAll(".on").forEach((other) => other.classList.remove("on"));
    token.classList.add("on");
    side.replaceChildren();
    fill(side, describeToken(w, Number(token.dataset.at) - w.start));
  };
  const pin = (token) => {
    select(token);
    history.replaceState(null, "", address({ tok: token.dataset.at }));
    document.getElementById("main").dataset.shown = location.hash;
  };
  const on = (act) => (event) => {
    const token = event.target.closest("[data-at]");
    if (token) act(token);
  };
  shown.addEventListener("pointerover", on(select));
  shown.addEventListener("click", on(pin));
  const line = given.as === "table" ? 1 : 10;
  const moves = { ArrowRight: 1, ArrowDown: line, ArrowLeft: -1, ArrowUp: -line };
  shown.dataset.arrows = "1";
  shown.arrow = (pressed) => {
    const all = [...shown.querySelectorAll("[data-at]")];
    const at = all.findIndex((token) => token.classList.contains("on")) + moves[pressed];
    const next = all[Math.max(0, Math.min(all.length - 1, at))];
    if (!next) return;
    pin(next);
    next.scrollIntoView({ block: "nearest" });
  };
  const pinned = given.tok !== undefined && shown.querySelector(`[data-at="${Number(given.tok)}"]`);
  if (!pinned) return;
  select(pinned);
  pinned.classList.add("pinned");
}

// Why the trainer's side of a row is empty: it never computed one, or the run did not keep it.
function noTrainer(name, item) {
  if (item.status === "failed")
    return h("p", { class: "soft" }, "A session that failed is not trained on: there is a sampler's side alone.");
  if (item.validation !== null)
    return h("p", { class: "soft" }, "A validation is not trained on: there is a sampler's side alone.");
  if (item.step === null)
    return h("p", { class: "soft" }, "No step trained on this trajectory: there is a sampler's side alone.");
  return h("p", { class: "soft" }, [
    "The trainer's side of these tokens is not recorded: ",
    h("code", { class: "mono" }, [
      visible(`treadle annotate ${runs.find((one) => one.name === name)?.dir ?? "RUN"} ${item.step}`),
    ]),
    " computes it by replay.",
  ]);
}

function drawStrip(strip, w, by, jump) {
  const width = 1000,
    height = 40,
    count = strip.bins.length || 1;
  const gap = by === "gap" && strip.bins.some((bin) => bin.gap !== null);
  const sized = {
    advantage: (v) => Math.abs(v) / 2,
    entropy: (v) => v / 3,
    weight: (v) => Math.abs(Math.log(Math.max(v, 1e-9))) / 0.7,
  };
  const own = by in sized && strip.bins.some((bin) => bin[by] !== null);
  const values = strip.bins.map((bin) =>
    Math.min(
      1,
      gap
        ? (bin.gap ?? 0) / 0.5
        : own
          ? bin[by] === null
            ? 0
            : sized[by](bin[by])
          : by === "version"
            ? 0.5
            : -(bin.logprob ?? 0) / 3,
    ),
  );
  const low = (bin) => own && (by === "weight" ? bin[by] < 1 : bin[by] < 0);
  const told = gap
    ? "largest gap between sampler and trainer"
    : own
      ? by
      : by === "version"
        ? "policy version"
        : "how unlikely";
  const figure = s(
    "svg",
    {
      class: "strip",
      viewBox: `0 0 ${width} ${height}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": `All ${strip.response} response tokens: ${told}`,
    },
    [
      strip.bins.map(
        (bin, at) =>
          bin.sampled > 0 &&
          s("rect", {
            x: (at / count) * width,
            width: Math.max(width / count - 0.3, 0.6),
            y: height - 3 - values[at] * (height - 6),
            height: 3 + values[at] * (height - 6),
            class: by === "version" ? "b" + (1 + (bin.version % 6)) : gap || low(bin) ? "b2" : "b1",
          }),
      ),
      w.ids.length < w.total &&
        s("rect", {
          class: "seen",
          x: (Math.max(0, w.start - strip.prompt) / Math.max(strip.response, 1)) * width,
          width: (w.ids.length / Math.max(strip.response, 1)) * width,
          y: 0,
          height,
        }),
    ],
  );
  figure.addEventListener("click", (event) => {
    const box = figure.getBoundingClientRect();
    const at = Math.floor(((event.clientX - box.left) / box.width) * strip.response) + strip.prompt;
    jump(Math.max(0, at - 200));
  });
  return figure;
}

// What a trainer would have that is given text: the same token, others, or none where an earlier one covers its place.
function encodedAgain(w, i) {
  if (!w.drift) return [h("td", { class: "num" }), h("td", {})];
  if (!w.drift[i]) return [h("td", { class: "num faint" }, w.ids[i]), h("td", { class: "faint" }, "the same")];
  const again = w.again[i] || [];
  if (!again.length)
    return [
      h("td", { class: "num drifted" }, "–"),
      h("td", { class: "drifted" }, w.texts[i] === null ? "no whole character" : "part of the one above"),
    ];
  return [
    h("td", { class: "num drifted" }, again.map(([id]) => id).join(", ")),
    h("td", { class: "mono drifted" }, [
      again.map(([, text], at) => [at ? " " : "", visible(text.replaceAll("\n", "↵"))]),
    ]),
  ];
}
const digits = (value, count) =>
  value === null || value === undefined
    ? "–"
    : Math.abs(value) < 0.5 * 10 ** -count
      ? (0).toFixed(count)
      : value.toFixed(count).replace("-", "−");

// Sampler and trainer beside each other: ids, text and logprobs, with the drift marked.
function tokenTable(w, given, address) {
  const order = w.ids.map((_, i) => i).filter((i) => w.mask[i]);
  if (given.sort === "gap" && w.trainer) order.sort((a, b) => Math.abs(gapOf(w, b) ?? 0) - Math.abs(gapOf(w, a) ?? 0));
  const most = Math.max(...order.map((i) => Math.abs(gapOf(w, i) ?? 0)), 0.01); // rounding draws no bar
  const row = (i) => {
    const gap = gapOf(w, i);
    return h("tr", { "data-at": w.start + i, tabindex: -1 }, [
      h("td", { class: "num soft" }, w.start + i),
      h("td", { class: "num" }, w.versions[i]),
      h("td", { class: "num" }, w.ids[i]),
      h("td", { class: "mono" }, [
        w.texts.length
          ? w.texts[i] === null
            ? "⟨" + w.bytes[i] + "⟩"
            : visible(w.texts[i].replaceAll("\n", "↵"))
          : "",
      ]),
      encodedAgain(w, i),
      h("td", { class: "num" }, digits(w.logprobs[i], 5)),
      h("td", { class: "num" }, digits(trainerOf(w, i), 5)),
      h("td", { class: "num" }, digits(gap, 6)),
      h("td", { class: "gapcell" }, [
        Math.abs(gap ?? 0) >= 0.0001
          ? h("i", {
              class: "gapbar " + (gap < 0 ? "p3" : "n3"),
              style: { width: `${Math.max(1, (Math.abs(gap) / most) * 90)}px` },
            })
          : "",
      ]),
    ]);
  };
  const whole = w.start === 0 && w.ids.length === w.total;
  const sorted =
    given.sort === "gap"
      ? h("a", { href: address({ sort: null }) }, "in their order")
      : h("a", { href: address({ sort: "gap" }) }, "largest gap first");
  return h("div", { class: "tokentable", tabindex: 0, role: "group", "aria-label": "Tokens" }, [
    h("p", { class: "soft" }, [
      `${plural(order.length, "sampled token")}${whole ? "" : " of this window"}`,
      w.trainer && [", ", sorted],
      ". ",
      w.trainer &&
        !whole && [h("a", { href: link(["run", run(), "find"], { order: "gap" }) }, "Largest gaps of the run"), ". "],
    ]),
    table(
      [
        "#position",
        "#version",
        "#sampled id",
        "text",
        "#encoded again: id",
        "text",
        "#sampler logprob",
        "#trainer logprob",
        "#gap",
        "",
      ],
      order.map(row),
      "Sampler and trainer, token by token",
    ),
  ]);
}

function showTime(name, item) {
  const turns = item.rows_shown.flatMap((row) => row.turns);
  const asked = turns.reduce((sum, turn) => sum + turn.generate_s, 0); // holds the engine's queue, too
  const first = Math.max(0, item.seconds.queue - Math.max(0, asked - item.seconds.generate));
  const spans = [["queue", 0, first]];
  let at = first;
  const timed = turns.length > 0 && turns.every((turn) => turn.started_s !== undefined);
  for (const turn of turns) {
    if (timed) at = turn.started_s;
    spans.push(["generate", at, turn.generate_s]);
    at += turn.generate_s;
    spans.push(["tool", at, turn.tool_s]);
    at += turn.tool_s;
  }
  if (timed) at = Math.max(at, item.seconds.total);
  spans.push(["score", at, item.seconds.score]);
  at += item.seconds.score;
  const updated = item.updates.map((update) => update.version).join(", ");
  const total = Math.max(item.seconds.total, at, 1e-9);
  const percent = (value) => `${(value / total) * 100}%`;
  const lanes = { queue: "b5", generate: "b1", tool: "b4", score: "b3" };
  const stages = Object.keys(lanes)
    .map((lane) => `${lane} ${seconds(item.seconds[lane])}`)
    .join(", ");
  const other = Math.max(0, item.seconds.total - spans.reduce((sum, [, , length]) => sum + length, 0));
  const between = other > 0.01 * total ? `, before and between turns ${seconds(other)}` : "";
  return [
    h("p", { class: "lede" }, [
      `Open for ${seconds(item.seconds.total)}: ${stages}${between}. `,
      timed
        ? "Each turn is drawn when it was asked for."
        : "Turns are drawn one after the other: this journal has their lengths and not when they began.",
    ]),
    h("div", { class: "lanes", role: "img", "aria-label": "Time of the session by stage" }, [
      Object.entries(lanes).map(([lane, colour]) => [
        h("span", {}, lane),
        h("div", { class: "lane" }, [
          spans
            .filter(([kind, , length]) => kind === lane && length > 0)
            .map(([, start, length]) =>
              h("i", {
                class: colour,
                title: seconds(length),
                style: { left: percent(start), width: percent(length) },
              }),
            ),
          item.updates.map((update) =>
            h("i", {
              class: "update",
              title: `new weights: version ${update.version}`,
              style: { left: percent(update.at) },
            }),
          ),
        ]),
      ]),
    ]),
    h("p", { class: "soft", style: { marginTop: "12px" } }, [
      item.updates.length
        ? `${plural(item.updates.length, "weight update")} while it was open (drawn in): versions ${updated}.`
        : "No weights were pushed while it was open.",
    ]),
    table(
      ["turn", "#began", "#generate", "#tool", "stop", "replica"],
      item.rows_shown.flatMap((row) =>
        row.turns.map((turn, index) =>
          h("tr", {}, [
            h("td", {}, (row.position ? `row ${row.position}, ` : "") + (index + 1)),
            h("td", { class: "num" }, turn.started_s === undefined ? "" : seconds(turn.started_s)),
            h("td", { class: "num" }, seconds(turn.generate_s)),
            h("td", { class: "num" }, turn.tool_s ? seconds(turn.tool_s) : ""),
            h("td", {}, turn.stop),
            h("td", { class: "mono soft" }, visible(turn.replica)),
          ]),
        ),
      ),
    ),
  ];
}

function showTree(name, item) {
  const below = (parent) => item.rows_shown.filter((row) => row.parent === parent);
  const longest = Math.max(...item.rows_shown.map((row) => row.prompt + row.response), 1);
  const at = (row, more = {}) => link(["run", name, "t", item.id, "tokens"], { row: row.position || null, ...more });
  const branch = (row) =>
    h("li", {}, [
      h("div", { class: "branch", "data-href": at(row), ...names(item, row.position) }, [
        h("div", {}, [
          h("a", { href: at(row) }, h("b", {}, row.position === 0 ? "row 0" : `row ${row.position}`)),
          h("span", { class: "soft" }, row.position ? " · " + originOf(row) : ""),
          " ",
          h("span", { class: "tag " + (row.trained ? "good" : "") }, row.why),
          h("span", { class: "soft beside" }, [
            h("a", { href: at(row, { as: "table" }) }, "sampler and trainer"),
            item.rows_shown.length > 1 && [
              " · ",
              h("a", { href: link(["run", name, "diff"], { id: item.id, row: row.position || null }) }, "compare…"),
            ],
          ]),
        ]),
        h("div", { class: "rowbar", "aria-hidden": "true" }, [
          h("i", { class: "prompt", style: { width: `${(row.prompt / longest) * 100}%` } }),
          h("i", { class: "b1", style: { width: `${(row.sampled / longest) * 100}%` } }),
          h("i", { class: "answered", style: { width: `${((row.response - row.sampled) / longest) * 100}%` } }),
        ]),
        h("div", { class: "soft" }, [
          `${plural(row.prompt, "prompt token")}, ${num(row.sampled)} sampled of `,
          `${plural(row.response, "response token")}, ${plural(row.turns.length, "turn")}`,
          row.versions.length
            ? row.versions[1] === row.versions[0]
              ? `, version ${row.versions[0]}`
              : `, versions ${row.versions[0]} – ${row.versions[1]}`
            : "",
        ]),
      ]),
      below(row.position).length > 0 && h("ul", { class: "tree" }, below(row.position).map(branch)),
    ]);
  return [
    h("p", { class: "lede" }, [
      "Rows are the sequences that train: the main one, and one for each fork, compaction or sub-agent. Grey is the ",
      "prompt, the strong blue was sampled, the other blue is what it was answered.",
    ]),
    h("ul", { class: "tree root" }, below(null).map(branch)),
    item.rows > item.rows_shown.length &&
      h("p", { class: "soft" }, `The first ${num(item.rows_shown.length)} of ${num(item.rows)} rows are shown.`),
  ];
}

// ── two rows beside each other ──────────────────────────────────────────────────────────────────────────────────────
const sideName = (line) => `${line.uid}/${line.sample}` + (line.row ? `, row ${line.row}` : "");
const when = (line) =>
  line.step !== null && line.step !== undefined
    ? `step ${line.step}`
    : line.validation !== null
      ? `validation after step ${line.validation}`
      : line.replaced
        ? "undone, or replaced by a later attempt"
        : "not trained";

async function showDiff(name, given) {
  if (!given.other) return showChoices(name, given);
  const found = await ask("diff", { run: name, ...given });
  const by = given.by in SIGNALS ? given.by : "logprob";
  const address = (changed) => link(["run", name, "diff"], { ...given, ...changed });
  const [left, right] = found.lines;
  const skip = Number(given.skip || 0);
  const side = (at) => diffSide(found, at, given, SIGNALS[by], address);
  const group = link(["run", name, "group"], { uid: left.uid, step: left.step });
  const swapped = link(["run", right.run, "diff"], {
    ...given,
    ...{ id: given.other, row: given.other_row, other: given.id, other_row: given.row },
    other_run: right.run === left.run ? null : name,
  });
  const from = diffBeginning(found, given, address);
  return [
    h("h1", {}, "Difference ", h("small", {}, h("a", { "data-key": "u", href: group }, visible(left.uid)))),
    h("p", { class: "lede" }, describeDifference(found, given), from && [" ", from, "."]),
    h("div", { class: "tools" }, [
      h("span", { class: "soft" }, "colour by"),
      colourChooser(by, found.sides, "not recorded for these two", address),
      h("a", { class: "soft", "data-key": "x", href: swapped }, "swap sides ", h("kbd", {}, "x")),
    ]),
    !found.same && skip === 0 && showParting(found),
    h("div", { class: "pair" }, side(0), side(1)),
    diffPager(found, skip, address),
  ];
}

function describeDifference(found, given) {
  const alone = given.from === "responses";
  const same = `${alone ? "Their responses are" : "They are"} the same`;
  if (found.same) return `${same} ${plural(found.shared, "token")}.`;
  if (!found.shared) return `${alone ? "Their responses" : "They"} differ from the first token on.`;
  return `${same} for ${plural(found.shared, "token")}, then they part at the outlined token.`;
}

// Rows of other tasks have other prompts: then their responses can be compared alone.
function diffBeginning(found, given, address) {
  if (found.same_prompt) return null;
  const alone = given.from === "responses";
  const href = address({ from: alone ? null : "responses", skip: null });
  return h("a", { href }, [
    alone ? "Compare from the prompts on" : "Their prompts differ: compare the responses alone",
  ]);
}

function diffPager(found, skip, address) {
  if (skip === 0 && !found.more) return null;
  const page = (pressed, to, label) =>
    h("a", { "data-key": pressed, class: "soft", href: address({ skip: to || null }) }, label);
  return h("p", { class: "tools" }, [
    skip > 0 && page("p", Math.max(0, skip - 400), "previous tokens"),
    found.more && page("n", skip + 400, "next tokens"),
  ]);
}

function diffSide(found, at, given, signal, address) {
  const line = found.lines[at],
    w = found.sides[at],
    beside = found.lines[1 - at];
  const own = link(["run", line.run, "t", line.id, "tokens"], {
    row: line.row || null,
    start: found.starts[at] || null,
  });
  const kept = at ? { id: given.id, row: given.row } : { id: given.other, row: given.other_row };
  return h("section", { "aria-label": at ? "Right side" : "Left side" }, [
    h("h2", names(line, line.row), h("a", { href: own }, visible(sideName(line)))),
    h("p", { class: "soft" }, [
      line.run !== beside.run && [visible(line.run), " · "],
      when(line),
      " · ",
      line.status === "failed" ? "failed" : `reward ${num(line.reward)}`,
      ` · ${plural(line.tokens, "sampled token")} · ${line.reason}`,
    ]),
    h("p", { class: "tools" }, [
      line.rows > 1 && diffRows(line, at, address),
      h("a", { class: "soft", href: link(["run", beside.run, "diff"], kept) }, "change"),
      at > 0 && [siblingLink(found, -1, address), siblingLink(found, 1, address)],
    ]),
    w.start < found.starts[at]
      ? h("p", { class: "soft" }, `It ends after ${plural(w.total, "token")}.`)
      : tokenFlow(w, signal, found.first[at] ?? -1),
  ]);
}

function diffRows(line, at, address) {
  const change = (event) => {
    const row = event.target.value === "0" ? null : event.target.value;
    go(address({ [at ? "other_row" : "row"]: row, skip: null }));
  };
  const option = (_, row) => h("option", { value: row, selected: row === line.row }, `row ${row}`);
  const attributes = { "aria-label": `Row of the ${at ? "right" : "left"} side`, onchange: change };
  return h("select", attributes, Array.from({ length: Math.min(line.rows, 256) }, option));
}

// The sample before or after the right one, unless it is the left one.
function siblingLink(found, offset, address) {
  const [left, { siblings, id }] = found.lines;
  const other = siblings[siblings.indexOf(id) + offset];
  if (other === undefined || other === left.id) return null;
  const href = address({ other, other_row: null, skip: null });
  const attributes = { class: "soft", "data-key": offset < 0 ? "[" : "]", href };
  return h("a", attributes, offset < 0 ? "previous sample" : "next sample");
}

// The token at which two rows part, as the sampler and, where it is recorded, the trainer saw it on each side.
function showParting(found) {
  const trained = found.sides.some((w) => w.trainer);
  const cells = (w, at) => {
    const i = found.first[at] - w.start;
    if (i >= w.ids.length) return ["(it ends here)", "–", "–", "–"];
    const text = w.texts.length
      ? w.texts[i] === null
        ? "⟨" + w.bytes[i] + "⟩"
        : w.texts[i].replaceAll("\n", "↵")
      : w.ids[i];
    return [
      text,
      w.mask[i] ? num(w.logprobs[i], 4) : "not sampled",
      w.mask[i] && w.logprobs[i] !== null ? num(Math.exp(w.logprobs[i])) : "–",
      w.mask[i] ? num(trainerOf(w, i), 4) : "–",
    ];
  };
  return table(
    [
      "where they part",
      "#position",
      "token",
      "#sampler logprob",
      "#probability",
      ...(trained ? ["#trainer logprob"] : []),
    ],
    found.sides.map((w, at) => {
      const [text, logprob, p, there] = cells(w, at);
      return h("tr", {}, [
        h("td", {}, visible(sideName(found.lines[at]))),
        h("td", { class: "num" }, num(found.first[at])),
        h("td", { class: "mono" }, visible(text)),
        h("td", { class: "num" }, logprob),
        h("td", { class: "num" }, p),
        trained && h("td", { class: "num" }, there),
      ]);
    }),
    "Where they part",
  );
}

// What a row may be compared with: its other rows, samples of its task here and at other steps, or any that is named.
async function showChoices(name, given) {
  const item = await ask("trajectory", { run: name, id: given.id });
  const group = await ask("group", { run: name, uid: item.uid, step: item.step });
  const row = Number(given.row || 0),
    others = runs.filter((other) => !other.problem);
  const address = (more) => link(["run", name, "diff"], { id: given.id, row: row || null, ...more });
  const line = (href, what, ...about) =>
    h("tr", { "data-href": href }, [
      h("td", {}, h("a", { href }, what)),
      about.map((cell, at) => h("td", { class: at === about.length - 1 ? "soft num" : "soft" }, cell)),
    ]);
  const section = (title, heads, rows) => rows.length > 0 && [h("h2", {}, title), table(heads, rows, title)];
  const problem = h("p", { class: "soft", role: "status" });
  const form = h(
    "form",
    {
      class: "choose",
      onsubmit: async (event) => {
        event.preventDefault();
        const asked = Object.fromEntries(new FormData(form));
        try {
          const { id } = await ask("locate", { run: asked.run || name, name: asked.name.trim() });
          go(
            address({
              other: id,
              other_row: asked.row === "0" ? null : asked.row,
              other_run: asked.run && asked.run !== name ? asked.run : null,
            }),
          );
        } catch (error) {
          problem.replaceChildren(...visible(error.message));
        }
      },
    },
    [
      others.length > 1 &&
        h("select", { name: "run", "aria-label": "Run" }, [
          others.map((other) => h("option", { value: other.name, selected: other.name === name }, plain(other.name))),
        ]),
      h("input", {
        name: "name",
        required: true,
        autocomplete: "off",
        "aria-label": "Trajectory",
        placeholder: "task and sample, such as " + plain(`${item.uid}/${item.sample}`) + ", or a trajectory's number",
      }),
      h("label", { class: "soft" }, "row ", h("input", { name: "row", value: "0", pattern: "[0-9]{1,6}", size: 3 })),
      h("button", { type: "submit" }, "Compare"),
    ],
  );
  return [
    h("h1", names(item, row), [
      "Compare ",
      visible(`${item.uid}/${item.sample}`),
      row ? `, row ${row} ` : " ",
      h("small", {}, [
        h("a", { "data-key": "u", href: link(["run", name, "t", item.id, "transcript"]) }, "back to it"),
        ` · ${when(item)}`,
      ]),
    ]),
    h("p", { class: "lede" }, [
      "Choose what to compare it with. Or mark it with ",
      h("kbd", {}, "m"),
      ", go to any other trajectory or row, and press ",
      h("kbd", {}, "d"),
      ".",
    ]),
    form,
    problem,
    section(
      "Its other rows",
      ["row", "", "#sampled tokens"],
      item.rows_shown
        .filter((other) => other.position !== row)
        .map((other) =>
          line(
            address({ other: item.id, other_row: other.position || null }),
            `row ${other.position}`,
            originOf(other),
            num(other.sampled),
          ),
        ),
    ),
    section(
      "Other samples of the task",
      ["sample", "reward", "ended by", "#sampled tokens"],
      group.samples
        .filter((other) => other.id !== item.id && other.has_body)
        .map((other) =>
          line(
            address({ other: other.id }),
            `sample ${other.sample}`,
            other.status === "failed" ? "failed" : num(other.reward),
            other.boundary || other.reason,
            num(other.tokens),
          ),
        ),
    ),
    section(
      "The same task at other steps",
      ["when", "#first sample"],
      group.elsewhere.map((other) =>
        line(address({ other: other.id }), when(other), visible(`${other.uid}/${other.sample}`)),
      ),
    ),
  ];
}

const OF_GROUPS = ["no_signal", "identical"];
function findingLink(name, item) {
  if (OF_GROUPS.includes(item.kind)) return link(["run", name, "group"], { uid: item.uid, step: item.step });
  if (item.row !== null)
    return link(["run", name, "t", item.id, "tokens"], {
      row: item.row || null,
      by: item.kind === "gap" ? "gap" : null,
      start: Math.max(0, item.start - 200) || null,
      mark: `${item.start}-${item.end}`,
    });
  return link(
    ["run", name, "t", item.id, "transcript"],
    item.message === null
      ? {}
      : {
          message: item.message,
          field: item.field === "content" ? null : item.field,
          span: `${item.start}-${item.end}`,
        },
  );
}

async function showFindings(name, given, { mine }) {
  const found = await ask("findings", { run: name });
  if (!found.is_over) setTimeout(() => mine === turn && show({ live: true }), 200);
  const count = (kind) => (found.counts[kind] || 0) + (found.validation_counts[kind] || 0);
  const told = (kind) => [
    num(found.counts[kind] || 0),
    found.validation_counts[kind] ? ` in training, ${num(found.validation_counts[kind])} in validation` : "",
  ];
  const kinds = Object.keys(found.titles).filter(count);
  const one = (item) => {
    const href = findingLink(name, item);
    const validated = item.validation !== null,
      uid = validated ? item.uid.slice(item.uid.indexOf("/") + 1) : item.uid;
    return h("article", { class: "finding", "data-href": href, ...names(item) }, [
      h("div", { class: "where" }, [
        h("a", { href, class: "mono" }, visible(OF_GROUPS.includes(item.kind) ? uid : `${uid}/${item.sample}`)),
        h("div", { class: "soft" }, [
          validated
            ? [h("span", { class: "tag" }, "validation"), ` after step ${item.validation}`]
            : item.step !== null
              ? `step ${item.step}`
              : "",
        ]),
      ]),
      h("div", {}, [
        visible(item.detail),
        item.excerpt && h("div", { class: "text soft", dir: "auto" }, visible(item.excerpt)),
      ]),
      h("div", { class: "exports" }, [
        exportLinks(name, { kind: item.kind, id: item.id, ...(item.start === null ? {} : { start: item.start }) }),
      ]),
    ]);
  };
  const shown = given.kind ? kinds.filter((kind) => kind === given.kind) : kinds;
  const trajectories = `${num(found.trajectories)} ${found.trajectories === 1 ? "trajectory" : "trajectories"}`;
  const validated = found.validation_trajectories ? ` and ${num(found.validation_trajectories)} of validations` : "";
  const read = `${trajectories} of ${plural(found.groups, "group")}${validated}`;
  const going = found.is_over ? (found.is_whole ? "" : ", the newest of the run") : ", and reading on";
  // A few of both where not all are shown: what happens in validation is as telling as what happens in training.
  const some = (all) =>
    given.kind
      ? all
      : [
          ...all
            .filter((item) => item.validation === null)
            .slice(0, all.some((item) => item.validation !== null) ? 5 : 8),
          ...all.filter((item) => item.validation !== null).slice(0, 3),
        ];
  return [
    h("h1", {}, "Findings"),
    h("p", { class: "lede" }, [
      `What to look at in ${read}${going}. They are pointers for a reader, not verdicts; nothing is left out of `,
      "training for them.",
    ]),
    kinds.length
      ? h("div", { class: "two" }, [
          bars(kinds.map((kind) => [found.titles[kind], count(kind), null, link(["run", name, "findings"], { kind })])),
        ])
      : h("p", { class: "empty" }, [
          found.is_over
            ? "Nothing was found: no group without signal, no repetition, nothing that looks gamed."
            : "Nothing was found yet.",
        ]),
    shown.map((kind) => [
      h("h2", {}, found.titles[kind], " ", h("small", {}, told(kind))),
      h("div", { "data-list": "1" }, some(found.findings.filter((item) => item.kind === kind)).map(one)),
      !given.kind &&
        count(kind) > 8 &&
        h("p", { class: "more" }, [
          h("a", { href: link(["run", name, "findings"], { kind }) }, [
            count(kind) > 400 ? "More of them" : `All ${num(count(kind))}`,
          ]),
        ]),
    ]),
  ];
}

// Filters of Find, as they stand beside each other: what is asked for, and where a list helps.
const FILTERS = [
  [
    "How it went",
    [
      ["min_reward", "reward from"],
      ["max_reward", "reward to"],
      ["part", "reward part, as answer<1"],
      ["status", "status", ["completed", "truncated", "failed"]],
      [
        "reason",
        "stop reason",
        ["stop", "length", "abort", "turn_limit", "invalid_calls", "tool_time", "deadline", "failure"],
      ],
      ["boundary", "failed at", ["prompt", "engine", "tool", "environment", "loop", "reward"]],
    ],
  ],
  [
    "How long",
    [
      ["min_tokens", "tokens from"],
      ["max_tokens", "tokens to"],
      ["min_turns", "turns from"],
      ["max_turns", "turns to"],
      ["min_rows", "rows from"],
      ["min_seconds", "seconds from"],
    ],
  ],
  [
    "Where from",
    [
      ["step", "step"],
      ["version", "policy version"],
      ["source", "data source"],
      ["uid", "task"],
      ["tool", "calls tool"],
      ["validation", "validation", ["yes", "no"]],
    ],
  ],
  [
    "Tokens",
    [
      ["min_gap", "sampler–trainer gap from"],
      ["echo", "agent's copy of a turn", ["exact", "equivalent", "reduced", "edited"]],
    ],
  ],
];
const ORDERS = [
  ["", "newest first"],
  ["worst", "lowest reward first"],
  ["best", "highest reward first"],
  ["gap", "largest sampler–trainer gap first"],
];

function findForm(name, given, sources) {
  const form = h("form", {
    class: "find",
    role: "search",
    onsubmit: (event) => {
      event.preventDefault();
      go(link(["run", name, "find"], Object.fromEntries(new FormData(form))));
    },
  });
  const box = ([key, label, choices]) =>
    h("label", { class: given[key] ? "set" : null }, [
      label,
      choices
        ? h("select", { name: key }, [
            h("option", { value: "" }, ""),
            choices.map((choice) => h("option", { value: choice, selected: given[key] === choice }, choice)),
          ])
        : h("input", {
            name: key,
            value: given[key] || "",
            autocomplete: "off",
            list: key === "source" ? "sources" : null,
          }),
    ]);
  const active = FILTERS.flatMap(([, filters]) => filters).filter(([key]) => given[key]);
  return fill(form, [
    h("div", { class: "asked" }, [
      h("input", {
        name: "q",
        type: "search",
        value: given.q || "",
        autocomplete: "off",
        "aria-label": "Words in messages",
        placeholder: 'words in messages: "a phrase", one OR other, NOT this; a word is found by its beginning',
      }),
      h("select", { name: "order", "aria-label": "Order", onchange: () => form.requestSubmit() }, [
        ORDERS.map(([value, label]) => h("option", { value, selected: (given.order || "") === value }, label)),
      ]),
      h("button", { type: "submit" }, "Find"),
    ]),
    h("details", { open: active.length > 0 || !Object.keys(given).length }, [
      h("summary", {}, [
        "Filters",
        active.length
          ? h("span", { class: "soft" }, [
              " · ",
              active.map(([key, label], at) => [at ? ", " : "", `${label} `, h("b", {}, visible(given[key]))]),
              " · ",
              h("a", { href: link(["run", name, "find"], { q: given.q, order: given.order }) }, "clear"),
            ])
          : "",
      ]),
      FILTERS.map(([title, filters]) => h("fieldset", {}, h("legend", {}, title), filters.map(box))),
    ]),
    h("datalist", { id: "sources" }, [
      sources.map((source) => h("option", { value: source, label: plain(source) === source ? null : plain(source) })),
    ]),
  ]);
}

function foundRow(name, item) {
  const { hit, gap } = item;
  const href = hit
    ? link(["run", name, "t", item.id, "transcript"], {
        message: hit.message,
        field: hit.field === "content" ? null : hit.field,
        span: `${hit.start}-${hit.end}`,
      })
    : gap
      ? link(["run", name, "t", item.id, "tokens"], {
          row: gap.row || null,
          by: "gap",
          start: Math.max(0, gap.position - 200) || null,
          mark: `${gap.position}-${gap.position + 1}`,
        })
      : link(["run", name, "t", item.id, "transcript"]);
  const excerpt = hit
    ? h("div", { class: "hit", dir: "auto" }, [
        visible(hit.before.replaceAll("\n", " ")),
        h("mark", {}, visible(hit.match.replaceAll("\n", " "))),
        visible(hit.after.replaceAll("\n", " ")),
      ])
    : h("div", { class: "clip soft" }, visible(item.detail || item.source));
  return h("tr", { "data-href": href, ...names(item, gap ? gap.row : 0) }, [
    h("td", {}, [
      h("a", { class: "mono", href }, [
        h("span", { class: "clip", style: { display: "inline-block", maxWidth: "30ch" } }, [
          visible(`${item.uid}/${item.sample}`),
        ]),
      ]),
    ]),
    h("td", { class: "num" }, item.step ?? ""),
    h("td", { class: "num" }, num(item.reward)),
    gap && h("td", { class: "num" }, digits(gap.gap, 4)),
    h("td", {}, outcomeTag(item)),
    h("td", { class: "num" }, num(item.tokens)),
    h("td", { class: "num" }, num(item.turns)),
    h("td", { class: "num" }, seconds(item.seconds.total)),
    h("td", { class: "wide" }, excerpt),
  ]);
}

async function showFind(name, given, { mine }) {
  const about = await ask("overview", { run: name });
  const note = h("p", { class: "soft", role: "status" });
  const gaps = given.order === "gap" || given.min_gap;
  const load = async (before) => {
    const page = await ask("find", { run: name, ...given, before });
    note.textContent =
      page.indexed < 1 ? `Reading the run${gaps ? "" : ", the newest first"}: ${Math.floor(page.indexed * 100)}%` : "";
    if (page.indexed < 1 && before === null)
      setTimeout(
        () => mine === turn && !/^(INPUT|SELECT)$/.test(document.activeElement?.tagName) && show({ live: true }),
        300,
      );
    return [page.samples.map((item) => foundRow(name, item)), page.next];
  };
  const [rows, next] = await load(null);
  const shown = table(
    ["trajectory", "#step", "#reward", ...(gaps ? ["#gap"] : []), "ended by", "#tokens", "#turns", "#time", ""],
    rows,
    "Trajectories",
  );
  return [
    h("h1", {}, "Find"),
    findForm(name, given, about.sources),
    note,
    rows.length
      ? [shown, endless(shown, load, null, next)]
      : h("p", { class: "empty" }, [
          gaps && !about.annotated
            ? "No trajectory has annotations: treadle annotate computes the trainer's side."
            : "No trajectory is like that.",
        ]),
  ];
}

async function showConfig(name, given) {
  const { keys } = await ask("config", { run: name, other: given.other });
  const others = runs.filter((item) => item.name !== name && !item.problem);
  const differs = (line) => given.other && line.value !== line.other;
  const lines =
    given.other && given.all !== "yes"
      ? keys.filter(differs)
      : given.all === "yes" || given.other
        ? keys
        : keys.filter((line) => !line.origin.startsWith("default"));
  return [
    h("h1", {}, [
      "Config ",
      h("small", {}, given.other ? [visible(name), " and ", visible(given.other)] : visible(name)),
    ]),
    h("p", { class: "lede" }, [
      given.other
        ? lines.length
          ? "What differs."
          : "The two configs are the same."
        : given.all === "yes"
          ? "Every key, with where its value came from. "
          : "What was set. ",
      " ",
      h("a", { href: link(["run", name, "config"], { ...given, all: given.all === "yes" ? null : "yes" }) }, [
        given.all === "yes" ? (given.other ? "only differences" : "only what was set") : "all keys",
      ]),
      others.map((item) => [
        " · ",
        h("a", { href: link(["run", name, "config"], { other: item.name }) }, "compare with ", visible(item.name)),
      ]),
    ]),
    table(
      given.other ? ["key", "here", "there", "origin"] : ["key", "value", "origin"],
      lines.map((line) =>
        h("tr", {}, [
          h("td", { class: "mono" }, visible(line.key)),
          h("td", { class: "mono" }, visible(line.value ?? "(not set)")),
          given.other && h("td", { class: "mono" }, visible(line.other ?? "(not set)")),
          h("td", { class: "soft" }, visible(line.origin)),
        ]),
      ),
    ),
  ];
}

// ── the frame ───────────────────────────────────────────────────────────────────────────────────────────────────────
const SCREENS = [
  ["", "Run", "r"],
  ["steps", "Steps", "s"],
  ["findings", "Findings", "f"],
  ["find", "Find", "/"],
  ["config", "Config", "c"],
];
// What a screen follows while a run is live: it is brought up to date when one of these changed. A step in force never
// changes but by a resume. Long lists stay as they are, and offer what is new: a page that moves cannot be read.
const FOLLOWS = {
  "": ["trajectories", "events", "metrics", "status"],
  steps: ["metrics", "status"],
  group: ["trajectories", "events"],
  findings: ["metrics"],
  step: ["start"],
};
const OFFERS = new Set(["validation", "tasks", "find"]);

// `view` is the turn of `show` that asks, and whether it brings a screen up to date.
async function screen(view) {
  const { parts, given, unread } = place();
  if (unread !== null)
    throw new Error(`this address cannot be read at ${unread}: a percent sign stands for two hexadecimal digits`);
  if (parts[0] !== "run") return showRuns();
  if (!runs.length) runs = await ask("runs");
  const [, name, what, which, tab] = parts;
  const broken = runs.find((item) => item.name === name && item.problem);
  if (broken) throw new Error(broken.problem);
  switch (what) {
    case undefined:
      return showRun(name, given, view);
    case "steps":
      return showSteps(name, given);
    case "step":
      return showGroups(name, given, { step: Number(which) });
    case "validation":
      return showGroups(name, given, { validation: Number(which) });
    case "tasks":
      return showGroups(name, given, {});
    case "group":
      return showGroup(name, given);
    case "t":
      return showTrajectory(name, Number(which), TABS.includes(tab) ? tab : "transcript", given);
    case "diff":
      return showDiff(name, given);
    case "findings":
      return showFindings(name, given, view);
    case "find":
      return showFind(name, given, view);
    case "config":
      return showConfig(name, given);
    default:
      throw new Error(`there is no screen ${what}`);
  }
}

function frame() {
  const { parts, given } = place();
  const [, name, what, which] = parts;
  const current =
    { step: "steps", validation: "steps", tasks: "steps", group: "steps", t: "steps", diff: "steps" }[what] ||
    what ||
    "";
  const trail = [];
  if (name) {
    const sep = () => h("span", { class: "sep", "aria-hidden": "true" }, "/");
    if (runs.length > 1)
      trail.push(
        h(
          "select",
          {
            "aria-label": "Run",
            onchange: (event) =>
              go(link(["run", event.target.value, ...(["steps", "findings", "config"].includes(what) ? [what] : [])])),
          },
          [runs.map((item) => h("option", { value: item.name, selected: item.name === name }, plain(item.name)))],
        ),
      );
    else trail.push(h("a", { href: link(["run", name]) }, visible(name)));
    if (what)
      trail.push(
        sep(),
        h("a", { href: link(["run", name, "steps"]), class: current === "steps" ? null : "faint" }, [
          current === "steps" ? "steps" : current,
        ]),
      );
    if (what === "step" || what === "validation") trail.push(sep(), h("b", {}, `${what} ${which}`));
    if (what === "group") trail.push(sep(), h("b", {}, visible(given.uid)));
    if (what === "t") trail.push(sep(), h("b", {}, "trajectory " + which));
    if (what === "diff") trail.push(sep(), h("b", {}, "difference"));
  }
  document.getElementById("trail").replaceChildren(...trail);
  document
    .getElementById("screens")
    .replaceChildren(
      ...(name
        ? SCREENS.map(([path, label, key]) =>
            h(
              "a",
              {
                href: link(["run", name, ...(path ? [path] : [])]),
                title: `key ${key === "/" ? "/" : "g " + key}`,
                "aria-current": path === current ? "page" : null,
              },
              [label],
            ),
          )
        : []),
    );
  document.title = plain([...parts.slice(1).reverse(), "treadle view"].join(" · ")).slice(0, 200);
}

let turn = 0,
  pulse = null;
async function show({ live = false } = {}) {
  const mine = ++turn,
    main = document.getElementById("main");
  if (!live) main.setAttribute("aria-busy", "true");
  let content;
  try {
    frame();
    content = await screen({ mine, live });
  } catch (error) {
    content = h("p", { class: "problem", role: "alert" }, visible(error.message));
  }
  if (mine !== turn || content === undefined) return;
  frame();
  document.getElementById("fresh").hidden = true;
  if (live && main.dataset.shown === (location.hash || "#/"))
    patchChildren(main, fill(document.createElement("div"), [content]));
  else {
    main.replaceChildren();
    fill(main, [content]);
    scrollTo(0, 0);
    main.focus({ preventScroll: true });
  }
  main.removeAttribute("aria-busy");
  const { given } = place();
  if (!live)
    (
      document.querySelector("main .message mark, main .marked, main .pinned") ??
      (given.message !== undefined && document.getElementById("message-" + Number(given.message))) ??
      null
    )?.scrollIntoView?.({ block: "center" });
  main.dataset.shown = location.hash || "#/";
}

// ── keyboard ────────────────────────────────────────────────────────────────────────────────────────────────────────
const KEYS = [
  ["j k", "next, previous in a list"],
  ["Enter", "open it"],
  ["u", "up: trajectory, group, step, steps, run"],
  ["[ ]", "previous, next step or sample"],
  ["1 2 3 4", "transcript, tokens, time, tree"],
  ["c", "colour tokens by the next signal"],
  ["n p", "next, previous tokens"],
  ["← → ↑ ↓", "move over tokens"],
  ["m", "mark a trajectory or row; again: unmark"],
  ["d", "compare with the marked one, or with another sample"],
  ["D", "choose what to compare with"],
  ["x", "swap the two sides of a difference"],
  ["v", "tokens as text, or sampler and trainer in a table"],
  ["r", "next row of a trajectory"],
  ["g r, g s, g f, g c", "run, steps, findings, config"],
  ["/", "find"],
  [".", "show what is new in a list of a live run"],
  ["y", "copy the command that opens this place again"],
  ["t", "light or dark"],
  ["?", "this list"],
];
// A line of a list is chosen by its class alone: a step to the next one touches two lines, however many there are.
const chosenLine = () => document.querySelector("main .at[data-href]");

function lineBeside(line, forward) {
  const main = document.getElementById("main");
  const accept = (node) => (node.dataset?.href ? NodeFilter.FILTER_ACCEPT : NodeFilter.FILTER_SKIP);
  const walker = document.createTreeWalker(main, NodeFilter.SHOW_ELEMENT, accept);
  walker.currentNode = line ?? main;
  return line && !forward ? walker.previousNode() : walker.nextNode();
}

async function chooseBeside(forward) {
  const line = chosenLine(),
    page = line?.closest("tbody");
  const beside = forward ? page?.nextElementSibling : page?.previousElementSibling;
  let next = lineBeside(line, forward);
  if (beside?.reload && next?.parentNode !== page && isGap(beside)) {
    await showPage(beside);
    next = lineBeside(line, forward);
  }
  if (!next) return;
  line?.classList.remove("at");
  next.classList.add("at");
  next.scrollIntoView({ block: "nearest", inline: "nearest" });
  next.querySelector("a")?.focus({ preventScroll: true });
  if (next.parentNode === next.closest("table")?.lastElementChild) document.querySelector("[data-more]")?.load();
}

function up() {
  const own = document.querySelector('main [data-key="u"]');
  if (own) return own.click();
  const { parts, given } = place();
  const [, name, what] = parts;
  if (what === "group" && given.step) return go(link(["run", name, "step", given.step]));
  if (["step", "validation", "group", "tasks", "t", "diff"].includes(what)) return go(link(["run", name, "steps"]));
  go(what ? link(["run", name]) : "#/");
}
let leading = false;
function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const name = run(),
    pressed = event.key;
  if (leading) {
    leading = false;
    const found = SCREENS.find(([, , letter]) => letter === pressed);
    if (found && name) go(link(["run", name, ...(found[0] ? [found[0]] : [])]));
    return;
  }
  const arrows = pressed.startsWith("Arrow") && document.querySelector("main [data-arrows]");
  if (arrows) {
    arrows.arrow(pressed);
    event.preventDefault();
    return;
  }
  if (pressed === "d" || pressed === "D") {
    compareChosen(pressed === "D");
    event.preventDefault();
    return;
  }
  const linked = document.querySelector(`main [data-key="${CSS.escape(pressed)}"]`);
  const actions = {
    j: () => chooseBeside(true),
    k: () => chooseBeside(false),
    u: up,
    m: markChosen,
    g: () => {
      leading = true;
    },
    "?": help,
    t: theme,
    y: copyPlace,
    ".": () => document.getElementById("fresh").hidden || show(),
    "/": () =>
      name &&
      (place().parts[2] === "find"
        ? document.querySelector("main [name=q]")?.focus()
        : go(link(["run", name, "find"]))),
    Enter: () => {
      const row = chosenLine();
      if (row && event.target.tagName !== "A" && event.target.tagName !== "BUTTON") go(row.dataset.href);
    },
    c: () => {
      const buttons = [...document.querySelectorAll('[aria-label="Colour tokens by"] button:not([disabled])')];
      if (buttons.length)
        buttons[
          (buttons.findIndex((button) => button.getAttribute("aria-pressed") === "true") + 1) % buttons.length
        ].click();
    },
  };
  if (linked && pressed !== "u") {
    linked.click();
    event.preventDefault();
    return;
  }
  if (actions[pressed]) {
    actions[pressed]();
    if (pressed !== "Enter") event.preventDefault();
  }
}
// ── marked for comparison: kept until the tab is closed, told at the foot of every screen ───────────────────────────
const readMark = () => {
  try {
    return JSON.parse(sessionStorage.getItem("treadle-mark"));
  } catch {
    return null;
  }
};
function showMarked() {
  const mark = readMark(),
    foot = document.getElementById("marked");
  foot.hidden = !mark;
  if (!mark) return;
  foot.replaceChildren(
    h("span", {}, [
      "Marked: ",
      h("a", { href: link(["run", mark.run, "t", mark.id, "tokens"], { row: mark.row || null }) }, visible(mark.name)),
      h("span", { class: "soft" }, " · choose another and press ", h("kbd", {}, "d"), " to compare"),
    ]),
    h("button", { type: "button", class: "quiet", "aria-label": "Unmark", onclick: () => setMark(null) }, "×"),
  );
}
function setMark(mark) {
  if (mark) sessionStorage.setItem("treadle-mark", JSON.stringify(mark));
  else sessionStorage.removeItem("treadle-mark");
  showMarked();
}
// The trajectory under the focus, in the chosen line of a list, or on the screen.
function chosenTrajectory() {
  const node =
    document.activeElement?.closest("main [data-t]") ??
    document.querySelector("main .at[data-t]") ??
    document.querySelector("main h1[data-t], main h2[data-t]");
  if (!node) return null;
  const [id, row] = node.dataset.t.split("/").map(Number);
  return { run: node.dataset.run ?? run(), id, row, name: node.dataset.name };
}
const isSame = (one, other) => one && other && one.run === other.run && one.id === other.id && one.row === other.row;
function markChosen() {
  const chosen = chosenTrajectory();
  setMark(chosen && !isSame(chosen, readMark()) ? chosen : null);
}
function compareChosen(choosing) {
  const mark = readMark(),
    chosen = chosenTrajectory(),
    offered = document.querySelector('main [data-key="d"]');
  if (choosing && chosen) return go(link(["run", chosen.run, "diff"], { id: chosen.id, row: chosen.row || null }));
  const inList = document.querySelector("main .at[data-t]") || document.activeElement?.closest("main [data-t]");
  if (mark && chosen && !isSame(mark, chosen) && runs.some((item) => item.name === mark.run))
    return go(
      link(["run", mark.run, "diff"], {
        id: mark.id,
        row: mark.row || null,
        other: chosen.id,
        other_row: chosen.row || null,
        other_run: chosen.run === mark.run ? null : chosen.run,
      }),
    );
  if (offered && !(inList && inList.tagName !== "H1")) return offered.click();
  if (chosen) go(link(["run", chosen.run, "diff"], { id: chosen.id, row: chosen.row || null }));
}
function help() {
  const dialog = document.getElementById("help");
  dialog.replaceChildren(
    h("h2", { style: { marginTop: 0 } }, "Keys"),
    h("dl", { class: "help" }, [KEYS.map(([keys, what]) => [h("dt", {}, h("kbd", {}, keys)), h("dd", {}, what)])]),
    h("button", { type: "button", onclick: () => dialog.close() }, "Close"),
  );
  dialog.showModal();
}
// A command, not an address: the token in the address is new with every start of the viewer.
async function copyPlace() {
  const quoted = (text) => "'" + text.replaceAll("'", "'\\''") + "'",
    sign = document.getElementById("live");
  const command = ["treadle view", ...runs.map((item) => quoted(item.dir)), "--at", quoted(location.hash)].join(" ");
  await navigator.clipboard.writeText(command).then(
    () => {
      sign.textContent = "command copied";
    },
    () => prompt("The command that opens this place again:", command),
  );
}
function theme() {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("treadle-theme", document.documentElement.dataset.theme);
}

// ── live ────────────────────────────────────────────────────────────────────────────────────────────────────────────
async function watch() {
  const sign = document.getElementById("live");
  try {
    const now = document.hidden ? null : await ask("pulse");
    const name = run();
    if (now && name && now[name]) {
      const { status } = now[name],
        what = place().parts[2] || "",
        before = pulse?.[name];
      sign.textContent = status === "running" ? "live" : status || "";
      sign.classList.toggle("on", status === "running");
      const [older, newer] = [pulse, now];
      pulse = now;
      if (
        older &&
        FOLLOWS[what]?.some((key) =>
          Object.keys(newer).some(
            (other) => (what === "" || other === name) && older[other]?.[key] !== newer[other]?.[key],
          ),
        ) &&
        (what !== "step" || (await stepWasUndone(name)))
      )
        await show({ live: true });
      if (before && OFFERS.has(what) && before.trajectories !== now[name].trajectories)
        document.getElementById("fresh").hidden = false;
    } else if (now) {
      sign.textContent = "";
      sign.classList.remove("on");
    }
    if (now) pulse = now;
  } catch {
    sign.textContent = "viewer ended";
    sign.classList.remove("on");
  }
  setTimeout(watch, 2000);
}

if (localStorage.getItem("treadle-theme"))
  document.documentElement.dataset.theme = localStorage.getItem("treadle-theme") === "dark" ? "dark" : "light";
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash is the address of the screen
  document.getElementById("main").focus();
});
document.getElementById("keys").addEventListener("click", help);
document.getElementById("fresh").addEventListener("click", () => show());
document.getElementById("theme").addEventListener("click", theme);
document.addEventListener("keydown", key);
document.addEventListener("click", (event) => {
  const row = event.target.closest("[data-href]");
  if (row && !event.target.closest("a, button, input, select") && !String(getSelection())) go(row.dataset.href);
});
addEventListener("hashchange", () => show());
showMarked();
show().then(watch);
