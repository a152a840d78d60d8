// Search in a page that was opened from a folder: browsers start no worker there, so its code runs in a hidden frame.
(() => {
  if (location.protocol !== "file:") return

  class IFrameWorker extends EventTarget {
    constructor(url) {
      super()
      this.onmessage = null
      this.onerror = null
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inner = frame.contentWindow
      const page = this.inner.document
      page.open()
      page.write("<!doctype html><body></body>")
      page.close()
      this.inner.postMessage = data => this.tell(new MessageEvent("message", { data }))
      this.inner.importScripts = (...urls) => urls.reduce((done, one) => done.then(() => load(page, one)), Promise.resolve())
      this.ready = load(page, url).catch(error => this.tell(new ErrorEvent("error", { error })))
    }

    tell(event) {
      this.dispatchEvent(event)
      const handler = this[`on${event.type}`]
      if (handler) handler(event)
    }

    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.inner.frameElement.remove()
    }
  }

  function load(page, url) {
    return new Promise((resolve, reject) => {
      const script = page.createElement("script")
      script.src = new URL(url, location.href)
      script.onload = resolve
      script.onerror = () => reject(new Error(`cannot load ${url}`))
      page.body.append(script)
    })
  }

  window.IFrameWorker = window.Worker = IFrameWorker
})()
