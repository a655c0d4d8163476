package aryk

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
)

// DefaultAddress is where arykd, as SPDK, listens if it is not told otherwise.
const DefaultAddress = "/var/tmp/spdk.sock"

// Client calls the daemon's methods. It connects at the first call, and again at the call after one that lost the connection.
type Client struct {
	transport transport
	lastID    atomic.Uint64
}

// transport carries requests to the daemon, and its replies back.
type transport interface {
	// roundTrip gives the reply to the request id, whose text is body.
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
	// Null where the daemon could not read a request.
	ID     *uint64         `json:"id"`
	Result json.RawMessage `json:"result"`
	Error  *Error          `json:"error"`
}

// Option changes how a client calls.
type Option func(*options)

type options struct {
	username, password string
	hasPassword        bool
	http               *http.Client
}

// WithBasicAuth names who calls by HTTP.
func WithBasicAuth(username, password string) Option {
	return func(o *options) { o.username, o.password, o.hasPassword = username, password, true }
}

// WithHTTPClient has the calls by HTTP made by that client.
func WithHTTPClient(client *http.Client) Option {
	return func(o *options) { o.http = client }
}

// New makes a client of the daemon at address: the path of its socket, unix:PATH, http://HOST:PORT or https://HOST:PORT.
func New(address string, opts ...Option) *Client {
	// A transport of its own, so that closing it closes nobody else's connections.
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

// Close ends the connection. Calls that wait for a reply fail.
func (c *Client) Close() error {
	return c.transport.close()
}

// Call calls any method by its name. Params is what JSON makes an object of, or nil; result is where the result goes, or nil.
//
// The error is an [*Error] if the daemon answered with one, the context's if that ended first (the call may be carried out nevertheless), a
// [*ConnectionError] if the daemon cannot be reached or went away, or an [*HTTPError].
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

// call is Call with a type of result.
func call[R any](ctx context.Context, c *Client, method string, params any) (R, error) {
	var result R
	err := c.Call(ctx, method, params, &result)
	return result, err
}

// Ptr gives a pointer to a value, for parameters that are optional.
func Ptr[T any](value T) *T {
	return &value
}
