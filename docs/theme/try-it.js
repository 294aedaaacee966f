// CartPole and the network that plays it, in plain JavaScript: Gymnasium's physics, the weights of a ppo.py run.
"use strict";
const cartpole = {
  // Gymnasium's CartPole-v1: one Euler step of 20 ms, the cart pushed left (0) or right (1) with 10 N
  step([x, v, angle, spin], action) {
    const gravity = 9.8, pole = 0.1, total = 1.1, length = 0.5, tau = 0.02, force = action ? 10 : -10;
    const cos = Math.cos(angle), sin = Math.sin(angle);
    const push = (force + pole * length * spin * spin * sin) / total;
    const turn = (gravity * sin - cos * push) / (length * (4 / 3 - (pole * cos * cos) / total));
    const pull = push - (pole * length * turn * cos) / total;
    return [x + tau * v, v + tau * pull, angle + tau * spin, spin + tau * turn];
  },
  isOver: ([x, , angle]) => Math.abs(x) > 2.4 || Math.abs(angle) > (12 * 2 * Math.PI) / 360,
  reset: (random) => Array.from({ length: 4 }, () => random() * 0.1 - 0.05),
  // the chance of a push to the right: two layers of 64 tanh units, and a softmax over the two actions
  chance(layers, state) {
    let x = state;
    layers.forEach(({ weight, bias }, i) => {
      x = weight.map((row, j) => row.reduce((sum, w, k) => sum + w * x[k], bias[j]));
      if (i < layers.length - 1) x = x.map(Math.tanh);
    });
    return 1 / (1 + Math.exp(x[0] - x[1]));
  },
  play(layers, random, limit = 500) {
    let state = this.reset(random), steps = 0;
    while (steps < limit && !this.isOver(state)) {
      state = this.step(state, random() < this.chance(layers, state) ? 1 : 0);
      steps += 1;
    }
    return steps;
  },
};

async function tryIt(root) {
  const { checkpoints } = await (await fetch(root.dataset.agent || "cartpole.json")).json();
  const find = (name) => root.querySelector(`[data-part=${name}]`);
  const canvas = find("canvas"), slider = find("slider"), pause = find("pause");
  const drawing = canvas.getContext("2d");
  let state, steps, games, returns, isPaused = matchMedia("(prefers-reduced-motion: reduce)").matches, rest = 0;

  function restart() {
    games = 0, returns = [];
    const { step, mean_return, episodes } = checkpoints[slider.value];
    find("step").textContent = step.toLocaleString("en");
    find("measured").textContent = `mean return ${mean_return.toFixed(0)} over ${episodes} games in Gymnasium`;
    find("mean").textContent = "";
    begin();
  }
  function begin() {
    state = cartpole.reset(Math.random), steps = 0, rest = 0;
  }
  function push(force) { // the reader gives the cart a knock
    state = [state[0], state[1] + force, state[2], state[3]];
  }
  function advance() {
    if (rest > 0) return --rest === 0 && begin();
    state = cartpole.step(state, Math.random() < cartpole.chance(checkpoints[slider.value].layers, state) ? 1 : 0);
    steps += 1;
    find("now").textContent = steps;
    if (steps === 500 || cartpole.isOver(state)) {
      returns.push(steps), (games += 1), (rest = 25);
      const mean = returns.reduce((a, b) => a + b) / games;
      find("mean").textContent = ` · mean of ${games} here: ${mean.toFixed(0)}`;
    }
  }
  function draw() {
    const width = canvas.clientWidth, height = canvas.clientHeight, scale = devicePixelRatio || 1;
    canvas.width = width * scale, canvas.height = height * scale;
    drawing.scale(scale, scale);
    const style = getComputedStyle(root), unit = width / 5.2, ground = height * 0.8;
    const x = width / 2 + state[0] * unit, top = ground - height * 0.08;
    drawing.strokeStyle = drawing.fillStyle = style.color;
    drawing.globalAlpha = rest ? 0.4 : 1;
    drawing.lineWidth = 1;
    drawing.beginPath(), drawing.moveTo(0, ground), drawing.lineTo(width, ground), drawing.stroke();
    for (const edge of [-2.4, 2.4]) {
      drawing.fillRect(width / 2 + edge * unit - 1, ground - 6, 2, 12);
    }
    drawing.fillRect(x - unit * 0.25, top, unit * 0.5, ground - top);
    const length = Math.min(unit, height * 0.6);
    drawing.strokeStyle = style.getPropertyValue("--md-accent-fg-color") || "orange";
    drawing.lineWidth = Math.max(5, unit * 0.08), drawing.lineCap = "round";
    drawing.beginPath(), drawing.moveTo(x, top);
    drawing.lineTo(x + length * Math.sin(state[2]), top - length * Math.cos(state[2])), drawing.stroke();
  }

  slider.max = checkpoints.length - 1;
  if (root.dataset.agent) slider.value = slider.max; // home shows the trained agent
  slider.addEventListener("input", restart);
  const label = () => (pause.textContent = isPaused ? "Play" : "Pause");
  pause.addEventListener("click", () => ((isPaused = !isPaused), label()));
  find("left").addEventListener("click", () => push(-1));
  find("right").addEventListener("click", () => push(1));
  root.hidden = false;
  label(), restart(), draw();
  let last = performance.now(), behind = 0;
  requestAnimationFrame(function frame(now) { // 50 steps a second, whatever the screen does
    behind = Math.min(behind + now - last, 100), last = now;
    for (; behind >= 20; behind -= 20) if (!isPaused) advance();
    draw();
    requestAnimationFrame(frame);
  });
}
document.querySelectorAll("#cartpole").forEach((root) => tryIt(root).catch((error) => {
  root.hidden = false;
  root.textContent = `cannot load the agent: ${error.message}`;
}));
