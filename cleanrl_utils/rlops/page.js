"use strict"
const data = JSON.parse(document.getElementById("data").textContent)
const shown = data.sides.map(() => true)
let axis = "steps", seeds = true
const HEIGHT = 240, LEFT = 52, RIGHT = 20, TOP = 8, BOTTOM = 36
const draws = []

const make = (name, attributes, parent) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name)
  for (const key in attributes) node.setAttribute(key, attributes[key])
  return parent.appendChild(node)
}
const shorten = n => Math.abs(n) >= 1e6 ? +(n / 1e6).toPrecision(4) + "M" : Math.abs(n) >= 1e3 ? +(n / 1e3).toPrecision(4) + "k" : String(+n.toPrecision(4))
const clock = s => s >= 7200 ? +(s / 3600).toPrecision(3) + " h" : s >= 180 ? +(s / 60).toPrecision(3) + " min" : +s.toPrecision(3) + " s"
const ticks = (low, high, count) => { // round numbers between low and high
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough))
  const step = power * [1, 2, 5, 10].find(m => m * power >= rough)
  const found = []
  for (let n = Math.ceil(low / step); n * step <= high + 1e-9 * step; n++) found.push(n * step)
  return found
}

function addChart(chart) {
  const figure = document.createElement("figure"), caption = document.createElement("figcaption")
  caption.textContent = chart.title
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), tip = document.createElement("div")
  svg.setAttribute("tabindex", 0)
  svg.setAttribute("role", "img")
  svg.setAttribute("aria-label", chart.title + ": " + chart.y)
  tip.className = "tip"
  tip.hidden = true
  figure.append(caption, svg, tip)
  document.getElementById("charts").append(figure)
  let place = null // of the cursor on the grid

  function draw() {
    const view = chart.axes[axis] || Object.values(chart.axes)[0], width = svg.clientWidth || 380
    svg.replaceChildren()
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`)
    const values = []
    view.sides.forEach((side, i) => shown[i] && values.push(...side.mean, ...side.low, ...side.high, ...(seeds ? side.runs.flatMap(run => run.values) : [])))
    const known = values.filter(v => v !== null)
    let low = Math.min(...known), high = Math.max(...known)
    if (!known.length) [low, high] = [0, 1]
    if (low === high) [low, high] = [low - 1, high + 1]
    const count = view.sides[0].mean.length
    const at = k => view.from + (view.to - view.from) * k / Math.max(count - 1, 1)
    const x = v => LEFT + (width - LEFT - RIGHT) * (v - view.from) / ((view.to - view.from) || 1)
    const y = v => TOP + (HEIGHT - TOP - BOTTOM) * (high - v) / (high - low)
    for (const v of ticks(low, high, 5)) {
      make("line", {class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(v), y2: y(v)}, svg)
      make("text", {x: LEFT - 6, y: y(v) + 4, "text-anchor": "end"}, svg).textContent = shorten(v)
    }
    const label = view.x === "time" ? clock : shorten
    for (const v of ticks(view.from, view.to, Math.max(2, Math.floor(width / 90))))
      make("text", {x: x(v), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle"}, svg).textContent = label(v)
    make("text", {x: (width + LEFT) / 2, y: HEIGHT - 4, "text-anchor": "middle"}, svg).textContent = view.x === "steps" ? "environment steps" : view.x
    const path = line => { // broken where there is no value
      let text = "", pen = "M"
      line.forEach((v, k) => { if (v === null) pen = "M"; else { text += `${pen}${x(at(k)).toFixed(1)},${y(v).toFixed(1)}`; pen = "L" } })
      return text
    }
    view.sides.forEach((side, i) => {
      if (!shown[i]) return
      const colour = `var(--side-${i % 7})`
      if (seeds) for (const run of side.runs)
        make("path", {d: path(run.values), fill: "none", style: `stroke: ${colour}`, "stroke-opacity": .4, ...(run.counts ? {} : {"stroke-dasharray": "2 3"})}, svg)
      const inside = side.mean.map((v, k) => k).filter(k => side.low[k] !== null)
      if (inside.length) {
        const up = inside.map(k => `${x(at(k)).toFixed(1)},${y(side.high[k]).toFixed(1)}`)
        const down = inside.reverse().map(k => `${x(at(k)).toFixed(1)},${y(side.low[k]).toFixed(1)}`)
        make("polygon", {points: [...up, ...down].join(" "), style: `fill: ${colour}`, "fill-opacity": .15}, svg)
      }
      make("path", {class: "mean", d: path(side.mean), fill: "none", style: `stroke: ${colour}`, "stroke-width": 2.2}, svg)
    })
    tip.hidden = place === null
    if (place === null) return
    place = Math.min(place, count - 1)
    make("line", {class: "cursor", x1: x(at(place)), x2: x(at(place)), y1: TOP, y2: HEIGHT - BOTTOM}, svg)
    tip.replaceChildren(label(at(place)))
    view.sides.forEach((side, i) => {
      if (!shown[i]) return
      const line = document.createElement("div"), dot = document.createElement("span"), v = side.mean[place]
      dot.className = "dot"
      dot.style.background = `var(--side-${i % 7})`
      const range = side.low[place] === null ? "" : ` (${shorten(side.low[place])} to ${shorten(side.high[place])})`
      const spread = v === null ? "no value" : shorten(v) + range
      line.append(dot, `${data.sides[i]}: ${spread}`)
      tip.append(line)
    })
    const right = x(at(place)) < width / 2
    tip.style.left = right ? `${x(at(place)) + 10}px` : "auto"
    tip.style.right = right ? "auto" : `${width - x(at(place)) + 10}px`
  }
  const move = event => {
    const view = chart.axes[axis] || Object.values(chart.axes)[0], box = svg.getBoundingClientRect(), count = view.sides[0].mean.length
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT)
    place = Math.round(Math.min(Math.max(share, 0), 1) * (count - 1))
    draw()
  }
  svg.addEventListener("pointermove", move)
  svg.addEventListener("pointerdown", move)
  svg.addEventListener("pointerleave", () => { place = null; draw() })
  svg.addEventListener("blur", () => { place = null; draw() })
  svg.addEventListener("keydown", event => {
    const way = {ArrowLeft: -1, ArrowRight: 1}[event.key]
    if (!way) return
    event.preventDefault()
    place = Math.max(0, (place ?? 0) + way)
    draw()
  })
  draws.push(draw)
}

function addButton(text, kind, isOn, toggle) {
  const button = document.createElement("button")
  button.className = kind
  button.append(...text)
  button.addEventListener("click", () => { toggle(); update() })
  document.getElementById("controls").append(button)
  draws.push(() => button.setAttribute("aria-pressed", isOn()))
}

const update = () => draws.forEach(draw => draw())
addButton(["over steps"], "axis", () => axis === "steps", () => axis = "steps")
addButton(["over time"], "axis", () => axis === "time", () => axis = "time")
data.sides.forEach((side, i) => {
  const dot = document.createElement("span")
  dot.className = "dot"
  dot.style.background = `var(--side-${i % 7})`
  addButton([dot, side], "side", () => shown[i], () => shown[i] = !shown[i])
})
addButton(["seeds"], "seeds", () => seeds, () => seeds = !seeds)
data.charts.forEach(addChart)
update()
addEventListener("resize", update)
