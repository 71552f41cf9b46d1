// Runs the search of a site that is read from a disk. Browsers refuse to start a Worker from a file,
// so a hidden frame takes its place: the frame and the page exchange messages as a Worker would.
"use strict";

class PageWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    window.addEventListener("message", (event) => {
      if (event.source !== this.inside) return;
      const message = new MessageEvent("message", { data: event.data });
      this.dispatchEvent(message);
      this.onmessage?.(message);
    });
    const page = this.inside.document;
    page.open();
    page.write(`<body><script>
      postMessage = (data) => parent.postMessage(data, "*");
      importScripts = async (...urls) => {
        for (const url of urls) {
          await new Promise((done) => {
            const script = document.createElement("script");
            script.src = url;
            script.onload = done;
            document.body.append(script);
          });
        }
      };
    </script><script src="${url}"></script></body>`);
    page.close();
    // Opening the document has removed the listeners of the frame.
    this.loaded = new Promise((resolve) => (this.inside.onload = resolve));
  }

  get inside() {
    return this.frame.contentWindow;
  }

  postMessage(data) {
    this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
  }

  terminate() {
    this.frame.remove();
  }
}

// The theme looks for this name, and then loads the scripts of languages relative to the frame.
window.IFrameWorker = PageWorker;
if (location.protocol === "file:") window.Worker = PageWorker;
