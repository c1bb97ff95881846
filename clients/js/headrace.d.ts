/** Bytes, or text that is published as UTF-8. */
export type Payload = string | ArrayBuffer | ArrayBufferView;

export type State =
  /** Waiting before the next attempt; `client.lastError` says why. */
  | "disconnected"
  /** An attempt is under way. */
  | "connecting"
  /** The server answers. */
  | "connected"
  /** For good, by `close`. */
  | "closed";

/** Messages of a topic did not and will not come: expired, or the topic was made anew. */
export interface Missed {
  readonly topic: string;
  /** The serial that delivery should have gone on from. */
  readonly asked: string;
  /** The serial that it goes on from. */
  readonly got: string;
}

/** Times are milliseconds. */
export interface Options {
  /** Publishes sent and not acknowledged; further ones wait. Default 4096. */
  windowMax?: number;
  /** The same in bytes; the last publish may go beyond it. Default 16 MiB. */
  windowBytesMax?: number;
  /** Received and not yet taken, for each subscription. Default 8 MiB. */
  receiveBytesMax?: number;
  /** Time between pings, which is also the time that an answer may take. Default 5000. */
  pingIntervalMs?: number;
  /** A publish not acknowledged for so long is sent again. Default 2000. */
  resendMs?: number;
  /** Time for one attempt to connect. Default 5000. */
  attemptTimeoutMs?: number;
  /** How long `close` waits for acknowledgements. Default 5000; 0: it does not wait. */
  flushTimeoutMs?: number;
  /** The share of each wait before an attempt that is cut off at random, 0 to 1. Default 0. */
  jitter?: number;
  /**
   * The token that the server is shown before anything else, in a message and never in the URL; or a
   * function that is asked for one for each connection, and before the token expires.
   */
  token?: string | (() => string | Promise<string>);
  /**
   * For pages, which should not have a token that lasts: a function that gets a ticket from your own
   * server for each connection. The ticket is good once, for 30 s, and goes into the URL.
   */
  ticket?: string | (() => string | Promise<string>);
  /** Send them also without TLS to another machine, where others can read them. Default false. */
  insecureToken?: boolean;
  /** The constructor of WebSockets. Default: the global one. */
  WebSocket?: new (url: string) => unknown;
}

/** Where a subscription starts; at most one of these. Without any: with the next message. */
export interface Start {
  /** The serial of a message: with the one after it. Null is as good as none. */
  serial?: string | null;
  /** With the record that begins there. The `nextOffset` of a message, also of one received over another protocol: with the one after it. */
  offset?: number | bigint;
  /** With the oldest message that is kept, or with the next one. */
  from?: "start" | "now";
}

/** What a named reader asks for: the server remembers how far it has come. */
export interface ReaderStart {
  /** The reader's name, 1 to 255 bytes of UTF-8. One client at a time reads under it. */
  reader: string;
  /** Where a reader starts that the server does not know yet. Default "oldest". */
  start?: "oldest" | "newest";
  /**
   * "auto", the default: asking for the next message acknowledges the one before it, and a handler
   * that has ended well its own. "manual": only `ack` does.
   */
  ack?: "auto" | "manual";
}

/** The state of a named reader of this client. */
export interface ReaderChange {
  readonly topic: string;
  readonly reader: string;
  /**
   * "waiting": another client reads. "active": this one does. "lost": messages that this client was
   * given and has not acknowledged went to another one.
   */
  readonly state: "waiting" | "active" | "lost";
  readonly reason: string;
}

export interface Message {
  readonly topic: string;
  /** Names the position just past this message: subscribe from it to get the next one. */
  readonly serial: string;
  /** The byte position in the topic where this record begins, as in the lake; null when the serial has none, or one beyond 2⁵³. */
  readonly offset: number | null;
  /** The byte position just past it, which the serial names: subscribe from it to get the next one. */
  readonly nextOffset: number | null;
  /** How many records of the topic precede it; null but for named readers. */
  readonly ordinal: number | null;
  /** The life of the topic, which another one of the same name does not share; null when neither the serial nor a named reader tells it. */
  readonly epoch: number | null;
  /** When the server stored it, as `Date.now()` counts; null but for named readers. */
  readonly time: number | null;
  /** A view of the bytes received: its `buffer` holds more than the payload. */
  readonly payload: Uint8Array;
  /** The payload decoded as UTF-8. */
  text(): string;
}

/**
 * The messages of one topic, for `for await`. Leaving a loop keeps the subscription, and the next loop
 * goes on where that one stopped.
 */
export interface Subscription extends AsyncIterableIterator<Message> {
  readonly topic: string;
  /**
   * The serial of the last message taken, or where delivery began: store it to resume later.
   * Null while the server has not said where the topic ends.
   */
  readonly serial: string | null;
  /** Wait until the server delivers the topic; gives the serial that it began from. */
  attached(): Promise<string>;
  /** End the iteration, drop what was not taken, and wait until the server has stopped. */
  unsubscribe(): Promise<void>;
}

/** The messages of one topic that a named reader has not acknowledged. */
export interface ReaderSubscription extends Subscription {
  readonly reader: string;
  /** The offset up to which everything is acknowledged, durably; null before the first connection. */
  readonly acknowledged: number | null;
  /** How often unacknowledged messages went to another client. */
  readonly losses: number;
  /**
   * Say that a message was handled, in any order: the reader resumes behind the last one before which
   * all were. Throws ReaderLostError when another client reads now.
   */
  ack(message: Message): void;
  /** Wait until everything that `ack` allows is stored: it is never delivered again. */
  flush(): Promise<void>;
}

/** Publishes to and subscribes to topics of one server, over as many connections as it takes. */
export interface Client {
  readonly url: string;
  readonly state: State;
  /** Round trip to the server, from the last answered ping; null before the first. */
  readonly latencyMs: number | null;
  /** Why the last connection, or attempt at one, ended; empty while connected. */
  readonly lastError: string;
  /** How many publishes wait for their acknowledgement. */
  readonly unacknowledged: number;

  /** Wait for a connection; with `timeoutMs`, rejects with ConnectTimeoutError after that time. */
  connected(options?: { timeoutMs?: number }): Promise<void>;

  /**
   * Publish; done when the server has acknowledged it. Publishes go out in the order of the calls,
   * whether or not their promises are waited for. Rejects with PublishRefusedError when the server
   * does not take this one; the others go on.
   */
  publish(topic: string, payload: Payload): Promise<void>;

  /** Wait until a publish would be sent at once: keeps the memory of one who publishes many bounded. */
  window(): Promise<void>;

  /**
   * Wait until everything published so far is acknowledged. Rejects with the first PublishRefusedError
   * since the last call, when there was one.
   */
  flush(): Promise<void>;

  /** Subscribe, once per topic. After a lost connection it goes on where it stopped. */
  subscribe(topic: string, start?: Start): Subscription;
  /** The same with a handler instead of a loop. One that returns a promise is waited for. */
  subscribe(
    topic: string,
    handler: (message: Message) => unknown,
    start?: Start,
  ): Omit<Subscription, keyof AsyncIterableIterator<Message>>;

  /** Subscribe as a named reader: go on where it stopped, and acknowledge what is handled. */
  subscribe(topic: string, start: ReaderStart): ReaderSubscription;
  /** The same with a handler. One that throws ends the subscription, and its message comes again. */
  subscribe(
    topic: string,
    handler: (message: Message) => unknown,
    start: ReaderStart,
  ): Omit<ReaderSubscription, keyof AsyncIterableIterator<Message>>;

  /** Be told of every change of the state. Returns a function that ends it. */
  on(event: "state", handler: (state: State) => void): () => void;
  /** Be told of missed messages before any message behind the gap can be taken. */
  on(event: "missed", handler: (missed: Missed) => void): () => void;
  /** Be told when a named reader of this client waits, becomes active, or is superseded. */
  on(event: "reader", handler: (change: ReaderChange) => void): () => void;

  /**
   * Wait up to `flushMs` for acknowledgements, then disconnect for good. Rejects with
   * UnacknowledgedError when they did not all come; with 0 it neither waits nor rejects.
   */
  close(options?: { flushMs?: number }): Promise<void>;
}

/** Make a client of the server at `ws://HOST:PORT`, which connects at once. */
export function connect(url: string, options?: Options): Client;

/** Anything that is rejected or thrown on purpose, but for a TypeError or RangeError of a bad argument. */
export class HeadraceError extends Error {}
/** A URL or an option that cannot be meant. */
export class ConfigError extends HeadraceError {}
/** A topic that is empty, over 255 bytes of UTF-8, or reserved: one that begins with `$`, say. */
export class BadTopicNameError extends HeadraceError {}
/** A payload over 256 KiB: split it. */
export class PayloadTooLargeError extends HeadraceError {}
/** A second subscription of a topic, or a loop over one that has a handler. */
export class LocalProtocolError extends HeadraceError {}
/** No server answered in time: check the address, or wait longer. */
export class ConnectTimeoutError extends HeadraceError {}
/** The client was closed: make a new one. */
export class ClientClosedError extends HeadraceError {}
/** The server closed the connection three times in a row when it was sent this publish, which is given up. */
export class PublishRefusedError extends HeadraceError {
  /** The close code and reason that the server gave last. */
  readonly reason: string;
}
/** Another client reads under this name: what was not acknowledged is delivered there. */
export class ReaderLostError extends HeadraceError {}
/** A reader's name that is refused, or a server without named readers. */
export class ReaderRefusedError extends HeadraceError {}
/** The server does not let this client in, or no longer: correct the token. */
export class RefusedError extends HeadraceError {}
/** Closed before all acknowledgements came: those messages may or may not be in the log. */
export class UnacknowledgedError extends HeadraceError {
  /** How many. */
  readonly publishes: number;
}
