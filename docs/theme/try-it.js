// Games of Gymnasium's classic control and the networks that play them, in plain JavaScript. A game has the physics of
// Gymnasium's environment, step by step: tests/test_site.py compares the two. The networks are those of our runs.
"use strict";
const clip = (x, low, high) => Math.min(Math.max(x, low), high);
const wrap = (angle) => angle - 2 * Math.PI * Math.floor((angle + Math.PI) / (2 * Math.PI)); // to [-pi, pi)
const between = (random, low, high) => low + random() * (high - low);

// step() returns the next state, the reward and whether the episode has ended; draw() gets a pen whose unit is a meter
const games = {
  cartpole: {
    title: "CartPole", limit: 500, rate: 50, width: 5.2, height: 2, // a push to the left (0) or right (1) with 10 N
    reset: (random) => Array.from({ length: 4 }, () => between(random, -0.05, 0.05)),
    observe: (state) => state,
    step([x, v, angle, spin], action) { // one Euler step of 20 ms
      const gravity = 9.8, pole = 0.1, total = 1.1, length = 0.5, tau = 0.02, force = action ? 10 : -10;
      const cos = Math.cos(angle), sin = Math.sin(angle);
      const push = (force + pole * length * spin * spin * sin) / total;
      const turn = (gravity * sin - cos * push) / (length * (4 / 3 - (pole * cos * cos) / total));
      const pull = push - (pole * length * turn * cos) / total;
      const next = [x + tau * v, v + tau * pull, angle + tau * spin, spin + tau * turn];
      return [next, 1, Math.abs(next[0]) > 2.4 || Math.abs(next[2]) > (12 * 2 * Math.PI) / 360];
    },
    knock: ([x, v, angle, spin], side) => [x, v + side, angle, spin],
    draw([x, , angle], pen) {
      pen.line(-2.6, -0.6, 2.6, -0.6);
      [-2.4, 2.4].forEach((edge) => pen.line(edge, -0.66, edge, -0.54, 2));
      pen.box(x - 0.25, -0.6, 0.5, 0.18);
      pen.rod(x, -0.42, angle, 1);
    },
  },
  acrobot: {
    title: "Acrobot", limit: 500, rate: 15, width: 4.6, height: 4.6, // a torque of -1, 0 or 1 Nm between the two links
    reset: (random) => Array.from({ length: 4 }, () => between(random, -0.1, 0.1)),
    observe: ([a, b, v, w]) => [Math.cos(a), Math.sin(a), Math.cos(b), Math.sin(b), v, w],
    slope([a, b, v, w], torque) { // two links of 1 m and 1 kg, with their centers of mass in the middle
      const { cos, sin, PI } = Math, g = 9.8;
      const d1 = 0.25 + 1 + 0.25 + cos(b) + 2, d2 = 0.25 + 0.5 * cos(b) + 1;
      const phi2 = 0.5 * g * cos(a + b - PI / 2);
      const phi1 = -0.5 * w * w * sin(b) - w * v * sin(b) + 1.5 * g * cos(a - PI / 2) + phi2;
      const second = (torque + (d2 / d1) * phi1 - 0.5 * v * v * sin(b) - phi2) / (0.25 + 1 - (d2 * d2) / d1);
      return [v, w, -(d2 * second + phi1) / d1, second];
    },
    step(state, action) { // one Runge-Kutta step of 0.2 s
      const dt = 0.2, add = (slope, t) => state.map((x, i) => x + t * slope[i]);
      const k1 = this.slope(state, action - 1), k2 = this.slope(add(k1, dt / 2), action - 1);
      const k3 = this.slope(add(k2, dt / 2), action - 1), k4 = this.slope(add(k3, dt), action - 1);
      const [a, b, v, w] = state.map((x, i) => x + (dt / 6) * (k1[i] + 2 * k2[i] + 2 * k3[i] + k4[i]));
      const next = [wrap(a), wrap(b), clip(v, -4 * Math.PI, 4 * Math.PI), clip(w, -9 * Math.PI, 9 * Math.PI)];
      const over = -Math.cos(next[0]) - Math.cos(next[0] + next[1]) > 1;
      return [next, over ? 0 : -1, over];
    },
    knock: ([a, b, v, w], side) => [a, b, v + 2 * side, w],
    draw([a, b], pen) {
      pen.line(-2.3, 1, 2.3, 1);
      const [x, y] = pen.rod(0, 0, Math.PI - a, 1);
      pen.rod(x, y, Math.PI - a - b, 1);
    },
  },
  mountaincar: {
    title: "MountainCar", limit: 200, rate: 30, width: 1.9, height: 1.3, // push to the left, not at all, to the right
    reset: (random) => [between(random, -0.6, -0.4), 0],
    observe: (state) => state,
    step([x, v], action) {
      v = clip(v + (action - 1) * 0.001 - Math.cos(3 * x) * 0.0025, -0.07, 0.07);
      x = clip(x + v, -1.2, 0.6);
      if (x === -1.2 && v < 0) v = 0;
      return [[x, v], -1, x >= 0.5 && v >= 0];
    },
    knock: ([x, v], side) => [x, clip(v + 0.03 * side, -0.07, 0.07)],
    draw([x], pen) {
      const ground = (x) => 0.45 * Math.sin(3 * x);
      const right = (x) => x + 0.3; // the track is from -1.2 to 0.6
      for (let at = -1.2; at < 0.6; at += 0.02) pen.line(right(at), ground(at), right(at + 0.02), ground(at + 0.02));
      pen.line(right(0.5), ground(0.5), right(0.5), ground(0.5) + 0.15, 2);
      pen.dot(right(x), ground(x) + 0.06, 0.06);
    },
  },
  pendulum: {
    title: "Pendulum", limit: 200, rate: 30, width: 2.6, height: 2.6, // a torque of at most 2 Nm, too little to lift it
    reset: (random) => [between(random, -Math.PI, Math.PI), between(random, -1, 1)],
    observe: ([angle, spin]) => [Math.cos(angle), Math.sin(angle), spin],
    step([angle, spin], action) { // one Euler step of 50 ms
      const torque = clip(action, -2, 2), tau = 0.05;
      const cost = wrap(angle) ** 2 + 0.1 * spin ** 2 + 0.001 * torque ** 2;
      spin = clip(spin + (15 * Math.sin(angle) + 3 * torque) * tau, -8, 8);
      return [[angle + spin * tau, spin], -cost, false];
    },
    knock: ([angle, spin], side) => [angle, clip(spin - 4 * side, -8, 8)],
    draw([angle], pen) {
      pen.rod(0, 0, -angle, 1);
      pen.dot(0, 0, 0.04);
    },
  },
};

// What an agent does: a multilayer perceptron, then a sample of its softmax, its largest output, or its clipped output.
function decide(agent, observation, random) {
  let x = observation;
  if (agent.obs_mean) x = x.map((value, i) => clip((value - agent.obs_mean[i]) / agent.obs_std[i], -10, 10));
  for (const { weight, bias, activation } of agent.layers) {
    x = weight.map((row, i) => row.reduce((sum, w, k) => sum + w * x[k], bias[i]));
    if (activation) x = x.map(activation === "tanh" ? Math.tanh : (value) => Math.max(value, 0));
  }
  if (agent.action === "clip") return clip(x[0], agent.low[0], agent.high[0]);
  if (agent.action === "argmax") return x.indexOf(Math.max(...x));
  const noisy = x.map((logit) => logit - Math.log(-Math.log(1 - random()))); // Gumbel-max sampling
  return noisy.indexOf(Math.max(...noisy));
}

function playEpisode(game, agent, random) { // its return
  let state = game.reset(random), total = 0;
  for (let steps = 0; steps < game.limit; steps += 1) {
    const [next, reward, over] = game.step(state, decide(agent, game.observe(state), random));
    state = next, total += reward;
    if (over) break;
  }
  return total;
}

class Pen { // draws in meters, with the origin in the middle
  constructor(canvas, game) {
    const width = canvas.clientWidth, height = canvas.clientHeight, scale = devicePixelRatio || 1;
    canvas.width = width * scale, canvas.height = height * scale;
    this.pen = canvas.getContext("2d");
    this.pen.scale(scale, scale);
    this.unit = Math.min(width / game.width, height / game.height);
    this.pen.translate(width / 2, height / 2);
    this.color = getComputedStyle(canvas).color;
    this.accent = getComputedStyle(canvas).getPropertyValue("--md-accent-fg-color") || "orange";
    this.pen.lineCap = "round";
  }
  line(x, y, toX, toY, width = 1, color = this.color) {
    const { pen, unit } = this;
    pen.strokeStyle = color, pen.lineWidth = width;
    pen.beginPath(), pen.moveTo(x * unit, -y * unit), pen.lineTo(toX * unit, -toY * unit), pen.stroke();
  }
  rod(x, y, angle, length) { // from the vertical, clockwise; returns its end
    const end = [x + length * Math.sin(angle), y + length * Math.cos(angle)];
    this.line(x, y, ...end, Math.max(5, this.unit * 0.08), this.accent);
    return end;
  }
  box(x, y, width, height) {
    this.pen.fillStyle = this.color;
    this.pen.fillRect(x * this.unit, -(y + height) * this.unit, width * this.unit, height * this.unit);
  }
  dot(x, y, radius) {
    const { pen, unit } = this;
    pen.fillStyle = this.accent;
    pen.beginPath(), pen.arc(x * unit, -y * unit, radius * unit, 0, 2 * Math.PI), pen.fill();
  }
}

const FRAME = `
  <p class="games" data-part="games"></p>
  <canvas data-part="canvas" role="img"></canvas>
  <p><label><b data-part="file"></b> after <b data-part="step"></b> steps <input data-part="slider" type="range" min="0" aria-label="Checkpoint"></label></p>
  <p><button class="md-button" data-part="left">Knock left</button> <button class="md-button" data-part="right">Knock right</button>
    <button class="md-button" data-part="pause">Pause</button></p>
  <p>step <b data-part="now">0</b> · <span data-part="measured"></span><span data-part="mean"></span></p>`;

async function tryIt(root) {
  root.innerHTML = FRAME;
  const find = (name) => root.querySelector(`[data-part=${name}]`);
  const canvas = find("canvas"), slider = find("slider"), pause = find("pause"), names = root.dataset.games.split(" ");
  let game, agents, state, steps, total, returns, rest, isPaused = matchMedia("(prefers-reduced-motion: reduce)").matches;

  async function choose(name) {
    const answer = await fetch(`${root.dataset.folder || ""}${root.dataset.agent || `${name}.json`}`);
    if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
    const { file, checkpoints } = await answer.json();
    game = games[name], agents = checkpoints;
    find("file").textContent = file;
    canvas.setAttribute("aria-label", `${game.title}, played by a trained agent`);
    find("games").querySelectorAll("button").forEach((button) => button.setAttribute("aria-pressed", button.name === name));
    slider.max = agents.length - 1;
    slider.value = names.length > 1 && name === "cartpole" ? 0 : slider.max; // which learns before your eyes
    root.dataset.game = name;
    restart();
  }
  function restart() {
    const { step, mean_return, episodes } = agents[slider.value];
    returns = [];
    find("step").textContent = step.toLocaleString("en");
    find("measured").textContent = `mean return ${mean_return.toFixed(0)} over ${episodes} episodes in Gymnasium`;
    find("mean").textContent = "";
    begin();
  }
  function begin() {
    state = game.reset(Math.random), steps = 0, total = 0, rest = 0;
  }
  function advance() {
    if (rest > 0) return --rest === 0 && begin();
    const [next, reward, over] = game.step(state, decide(agents[slider.value], game.observe(state), Math.random));
    state = next, total += reward, steps += 1;
    find("now").textContent = steps;
    if (steps === game.limit || over) {
      returns.push(total), rest = Math.round(game.rate / 2);
      const mean = returns.reduce((a, b) => a + b) / returns.length;
      find("mean").textContent = ` · here: mean return ${mean.toFixed(0)} over ${returns.length}`;
    }
  }
  function draw() {
    const pen = new Pen(canvas, game);
    pen.pen.globalAlpha = rest ? 0.4 : 1;
    game.draw(state, pen);
  }

  for (const name of names.length > 1 ? names : []) {
    const button = document.createElement("button");
    button.className = "md-button", button.name = name, button.textContent = games[name].title;
    button.addEventListener("click", () => choose(name).catch((error) => tell(root, error)));
    find("games").append(button);
  }
  slider.addEventListener("input", restart);
  const label = () => (pause.textContent = isPaused ? "Play" : "Pause");
  pause.addEventListener("click", () => ((isPaused = !isPaused), label()));
  find("left").addEventListener("click", () => (state = game.knock(state, -1)));
  find("right").addEventListener("click", () => (state = game.knock(state, 1)));
  label();
  await choose(names[0]);
  let last = performance.now(), behind = 0;
  requestAnimationFrame(function frame(now) { // as many steps a second as the game has, whatever the screen does
    const period = 1000 / game.rate;
    behind = Math.min(behind + now - last, 100), last = now;
    for (; behind >= period; behind -= period) if (!isPaused) advance();
    draw();
    requestAnimationFrame(frame);
  });
}
function tell(root, error) {
  root.textContent = `cannot load the agent: ${error.message}`;
}
document.querySelectorAll(".playground").forEach((root) => tryIt(root).catch((error) => tell(root, error)));
