import { HeadraceError, type Options as ClientOptions, type State } from "./headrace.js";

export type { State } from "./headrace.js";

/** Bytes, or anything that JSON has. */
export type Content = unknown;

/** What comes has one of these. */
export interface Held {
  /** A JSON value. Numbers are exact up to 2⁵³. */
  readonly payload?: any;
  /** Bytes, where bytes were sent. */
  readonly bytes?: Uint8Array;
}

export interface Message extends Held {
  /** Who has sent it. */
  readonly processor: string;
  /** Which of the messages of its processor it is. */
  readonly number: number;
  /** Just past this message in the log of the channel. */
  readonly nextOffset: number;
  /** When it was stored, in milliseconds since 1970. */
  readonly ms: number;
}

/** Messages of the channel did not and will not come. */
export interface Missed {
  /** How many, this processor's own included; null when nobody can say. */
  readonly messages: number | null;
  readonly reason: "trimmed" | "destroyed" | "lost";
}

/** The last known state: what all messages up to an offset have been folded into. */
export interface Snapshot extends Held {
  /** Just past the last message that is in it. */
  readonly offset: number;
  readonly epoch: number;
}

export interface Restored extends Snapshot {
  /** What it stands in for that this processor will never see, if there is any. */
  readonly missed: Missed | null;
}

/** Times are milliseconds. */
export interface ChannelOptions
  extends Pick<ClientOptions, "attemptTimeoutMs" | "flushTimeoutMs" | "jitter" | "WebSocket"> {
  /**
   * The name of this client, which no other may have, and which it keeps: under it the server
   * remembers what was sent and acknowledged. 1 to 255 bytes of UTF-8.
   */
  processor: string;
  /**
   * What the server is shown, where it has tokens; or a function that is asked for it for each
   * connection.
   */
  token?: string | (() => string | Promise<string>);
  /**
   * For pages, which should not have a token that lasts: a function that gets a ticket from your own
   * server for each connection. The ticket is good once, for 30 s, and goes into the URL.
   */
  ticket?: string | (() => string | Promise<string>);
  /** Send them also without TLS to another machine, where others can read them. Default false. */
  insecureToken?: boolean;
  /**
   * `push`: messages come of themselves, the default; `signal`: they are announced, and fetched when
   * the application has nothing left to do; `poll`: they are asked for every `pollIntervalMs`.
   */
  receive?: "push" | "signal" | "poll";
  /**
   * `"state"`: `restore` is called first of all, with the state as of now; then every message behind
   * it comes, this processor's own included. For a page that shows what everybody sees. After a lost
   * connection messages go on behind the last one, or `restore` is called again where they are gone.
   * Without it messages come from the processor's cursor on, and its own do not.
   */
  from?: "state";
  /**
   * How long the membership lasts without a connection, 1000 at least: then it ends. Never longer
   * than the server's `channels.lease_s`, which counts without it.
   */
  leaseMs?: number;
  /**
   * Leave when the page is closed, loaded again or put aside, and join again when the browser shows
   * it again. Default false.
   */
  leaveOnPagehide?: boolean;
  /**
   * Called with the last known state where there is one in place of messages, before any message
   * behind it is given out, and waited for. Then the state is acknowledged. With `from: "state"` it
   * is always called, with the payload null where nothing was ever sent.
   */
  restore?: (state: Restored) => unknown;
  /** Called for every message instead of a loop, and waited for. Then the message is acknowledged. */
  handle?: (message: Message) => unknown;
  /** Messages sent and not accepted; further ones wait. Default 4096. */
  windowMax?: number;
  /** The same in bytes; the last message may go beyond it. Default 16 MiB. */
  windowBytesMax?: number;
  /** Time between pings; a connection that is silent for so long behind one is given up. Default 5000. */
  pingIntervalMs?: number;
  /** Time before asking again, with `receive: "poll"`. Default 1000. */
  pollIntervalMs?: number;
  /** Time before something is tried again that the server could not do for now. Default 1000. */
  retryMs?: number;
}

/**
 * A member of a channel, and the messages of the others for `for await`. Asking for the next message
 * acknowledges the last one. Leaving a loop keeps the channel, and the next loop goes on where that
 * one stopped.
 */
export interface Channel extends AsyncIterableIterator<Message> {
  readonly url: string;
  readonly name: string;
  readonly processor: string;
  /** `connected` when the channel is joined. */
  readonly state: State;
  /** Round trip to the server, from the last answered ping; null before the first. */
  readonly latencyMs: number | null;
  /** Why the last connection, or attempt at one, ended; empty while connected. */
  readonly lastError: string;
  /** Why it ended for good, if neither by `close` nor by `leave`; else null. */
  readonly error: Error | null;
  /** How many messages the server is not known to have. */
  readonly unacknowledged: number;

  /** Wait until it is joined; with `timeoutMs`, rejects with ConnectTimeoutError after that time. */
  connected(options?: { timeoutMs?: number }): Promise<void>;

  /**
   * Send; done when it is stored, once and in the order of the calls. Gives the offset just past it, or null when
   * the answer got lost. Rejects with ChannelError for what the server refuses, and with TypeError for
   * what is neither JSON nor bytes: half of a surrogate pair is no text.
   */
  send(content: Content): Promise<number | null>;

  /** Wait until there is room for more: keeps the memory of one who sends many bounded. */
  window(): Promise<void>;

  /** Wait until everything sent so far is stored or refused. */
  flush(): Promise<void>;

  /** This message and all before it are done with: for loops that are left, and inside handlers. */
  ack(message: Message): void;

  /** The state as of now; with the reducer `uploaded`, the last upload. Null when there is none. */
  snapshot(): Promise<Snapshot | null>;

  /**
   * Give the state that all messages up to an offset make, where the reducer is `uploaded`. Gives
   * the offset of the state that is kept, which may be a later one.
   */
  upload(state: Content, offset: number): Promise<number>;

  /** Be told of every change of the state. Returns a function that ends it. */
  on(event: "state", handler: (state: State) => void): () => void;
  /** Be told of missed messages, before `restore` and before any message behind them. */
  on(event: "missed", handler: (missed: Missed) => void): () => void;

  /**
   * Be a member no more, when everything sent is stored: nothing is kept for this processor. Ends
   * the channel in any case; rejects when it could not be done within `timeoutMs`, which is
   * `flushTimeoutMs` by default.
   */
  leave(options?: { timeoutMs?: number }): Promise<void>;

  /**
   * Wait up to `flushMs` for the server to have everything, then disconnect for good; messages wait
   * for the next time. Rejects with UnacknowledgedError when it does not have all that was sent; with
   * 0 it neither waits nor rejects.
   */
  close(options?: { flushMs?: number }): Promise<void>;
}

/** Join the channel at `channel://HOST:PORT/NAME`, at once and over as many connections as it takes. */
export function joinChannel(url: string, options: ChannelOptions): Channel;

/** The server has refused something, or ended the channel. */
export class ChannelError extends HeadraceError {
  /** `replaced`, or the server's code: see its documentation. */
  readonly code: string;
}
