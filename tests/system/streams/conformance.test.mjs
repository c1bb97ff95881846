// The protocol's own conformance suite, against the server at CONFORMANCE_TEST_URL. With CONFORMANCE_TOKEN, every
// request shows that token.
import { runConformanceTests } from "@durable-streams/server-conformance-tests"

const token = process.env.CONFORMANCE_TOKEN
if (token) {
  const plain = globalThis.fetch
  globalThis.fetch = (url, options = {}) => {
    const headers = new Headers(options.headers ?? (url instanceof Request ? url.headers : undefined))
    headers.set("Authorization", `Bearer ${token}`)
    return plain(url, { ...options, headers })
  }
}

runConformanceTests({ baseUrl: process.env.CONFORMANCE_TEST_URL, subscriptions: false })
