// The search runs in a Worker, which browsers refuse to a page on the disk. There an iframe runs its script instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const inner = (this.inner = frame.contentWindow)
      const load = (src) =>
        new Promise((done, failed) => {
          const script = inner.document.createElement("script")
          Object.assign(script, { src, onload: done, onerror: failed })
          inner.document.body.appendChild(script)
        })
      inner.importScripts = (...all) => all.reduce((before, src) => before.then(() => load(src)), Promise.resolve())
      inner.postMessage = (data) => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      this.ready = load(url)
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {}
  }
}
