// The search runs in a worker. Browsers refuse workers in pages that are opened from the disk, so there this class
// runs the script in a hidden frame. The theme would load such a class from the network; "IFrameWorker" is its name for it.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inner = frame.contentWindow
      inner.document.open()
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inner.document.write(`<script src="${url}"></script>`)
      inner.document.close()
      this.loaded = new Promise(done => inner.addEventListener("load", done)).then(() => inner)
    }

    postMessage(data) {
      this.loaded.then(inner => inner.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
  window.Worker = window.IFrameWorker
}
