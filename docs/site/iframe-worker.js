// A browser starts no worker for a page that lies in a folder. Search needs one: here it is a hidden frame that runs the same script.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html>";
      this.started = new Promise((resolve) => {
        this.frame.addEventListener("load", () => this.start(url, resolve), { once: true });
      });
      document.body.append(this.frame);
    }

    start(url, resolve) {
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => {
        const message = new MessageEvent("message", { data });
        this.dispatchEvent(message);
        this.onmessage?.(message);
      };
      const load = (address) =>
        new Promise((done) => {
          const script = inside.document.createElement("script");
          script.src = new URL(address, document.baseURI).href;
          script.onload = done;
          inside.document.head.append(script);
        });
      inside.importScripts = (...addresses) =>
        addresses.reduce((before, address) => before.then(() => load(address)), Promise.resolve());
      load(url).then(resolve);
    }

    postMessage(data) {
      this.started.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
