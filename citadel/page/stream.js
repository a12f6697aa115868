// Server-sent events by fetch, since EventSource cannot send a key in a header.

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: ")) yield { data: line.slice(6) };
        else if (line.startsWith(": ")) yield { comment: line.slice(2) };
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined); // it has failed already: there is nothing left to stop
  }
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function call(path, key, options = {}) {
  const headers = { Authorization: `Bearer ${key}`, ...options.headers };
  const response = await fetch(path, { cache: "no-store", ...options, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new Refused(response.status, body.error?.message ?? body.message ?? `status ${response.status}`);
}
