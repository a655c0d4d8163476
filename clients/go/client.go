package aryk

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
)

// DefaultAddress is the default socket of arykd, and of SPDK.
const DefaultAddress = "/var/tmp/spdk.sock"

// Client calls the daemon's methods. The first call connects; after a lost connection, the next call connects again.
type Client struct {
	transport transport
	lastID    atomic.Uint64
}

// transport carries requests to the daemon, and its replies back.
type transport interface {
	// roundTrip sends body, which is the request id, and returns its reply.
	roundTrip(ctx context.Context, id uint64, body []byte) (*reply, error)
	close() error
}

// request is a JSON-RPC 2.0 request.
type request struct {
	Version string `json:"jsonrpc"`
	ID      uint64 `json:"id"`
	Method  string `json:"method"`
	Params  any    `json:"params,omitempty"`
}

// reply is a JSON-RPC 2.0 response.
type reply struct {
	// Null if the daemon could not parse a request.
	ID     *uint64         `json:"id"`
	Result json.RawMessage `json:"result"`
	Error  *Error          `json:"error"`
}

// Option is an option of New.
type Option func(*options)

type options struct {
	username, password string
	hasPassword        bool
	http               *http.Client
}

// WithBasicAuth sets user name and password for HTTP.
func WithBasicAuth(username, password string) Option {
	return func(o *options) { o.username, o.password, o.hasPassword = username, password, true }
}

// WithHTTPClient makes HTTP calls with the given client.
func WithHTTPClient(client *http.Client) Option {
	return func(o *options) { o.http = client }
}

// New returns a client of the daemon at address: the path of its socket, unix:PATH, http://HOST:PORT or https://HOST:PORT.
func New(address string, opts ...Option) *Client {
	// The client has its own transport, so that closing it closes no other connections.
	o := options{http: &http.Client{Transport: http.DefaultTransport.(*http.Transport).Clone()}}
	for _, opt := range opts {
		opt(&o)
	}
	if strings.HasPrefix(address, "http://") || strings.HasPrefix(address, "https://") {
		return &Client{transport: &httpTransport{url: address, options: o}}
	}
	if strings.HasPrefix(address, "unix:") {
		address = strings.TrimPrefix(strings.TrimPrefix(address, "unix:"), "//")
	}
	return &Client{transport: newSocketTransport(address)}
}

// Close closes the connection. Calls that wait for a reply fail.
func (c *Client) Close() error {
	return c.transport.close()
}

// Call calls any method by its name. Params is a value that marshals to a JSON object, or nil; result points to the value for the result, or is nil.
//
// The error is an [*Error] if the daemon answered with an error, the context's error if the context ended first (the daemon may still carry
// out the call), a [*ConnectionError] if the daemon cannot be reached or closed the connection, or an [*HTTPError].
func (c *Client) Call(ctx context.Context, method string, params, result any) error {
	id := c.lastID.Add(1)
	body, err := json.Marshal(request{Version: "2.0", ID: id, Method: method, Params: params})
	if err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	reply, err := c.transport.roundTrip(ctx, id, body)
	if err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	if reply.Error != nil {
		return fmt.Errorf("%s: %w", method, reply.Error)
	}
	if result == nil {
		return nil
	}
	if err := json.Unmarshal(reply.Result, result); err != nil {
		return fmt.Errorf("%s: the result: %w", method, err)
	}
	return nil
}

// call is Call with a typed result.
func call[R any](ctx context.Context, c *Client, method string, params any) (R, error) {
	var result R
	err := c.Call(ctx, method, params, &result)
	return result, err
}

// Ptr returns a pointer to a value, for optional parameters.
func Ptr[T any](value T) *T {
	return &value
}
