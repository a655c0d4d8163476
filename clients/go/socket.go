package aryk

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
)

var (
	errClosed = errors.New("the client is closed")
	errEnded  = errors.New("the daemon closed the connection")
	errStray  = errors.New("the daemon sent a reply without a request")
)

// socketTransport makes calls over a UNIX socket: one connection, on which requests follow one another without frames.
type socketTransport struct {
	path string
	// token is held by the goroutine that reads or sets conn.
	token    chan struct{}
	conn     *conn
	isClosed bool
}

func newSocketTransport(path string) *socketTransport {
	return &socketTransport{path: path, token: make(chan struct{}, 1)}
}

func (t *socketTransport) roundTrip(ctx context.Context, id uint64, body []byte) (*reply, error) {
	c, err := t.connected(ctx)
	if err != nil {
		return nil, err
	}
	return c.roundTrip(ctx, id, body)
}

func (t *socketTransport) connected(ctx context.Context) (*conn, error) {
	select {
	case t.token <- struct{}{}:
		defer func() { <-t.token }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if t.isClosed {
		return nil, &ConnectionError{errClosed}
	}
	if t.conn != nil && !t.conn.hasEnded() {
		return t.conn, nil
	}
	var dialer net.Dialer
	socket, err := dialer.DialContext(ctx, "unix", t.path)
	if err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, &ConnectionError{err}
	}
	t.conn = newConn(socket)
	return t.conn, nil
}

func (t *socketTransport) close() error {
	t.token <- struct{}{}
	defer func() { <-t.token }()
	t.isClosed = true
	if t.conn != nil {
		t.conn.end(errClosed)
	}
	return nil
}

// conn is a connection: one goroutine writes, another reads, and callers wait.
type conn struct {
	socket net.Conn
	writes chan []byte
	// ended is closed when the connection has ended and why is set.
	ended chan struct{}

	mu      sync.Mutex
	waiting map[uint64]chan *reply
	why     error
}

func newConn(socket net.Conn) *conn {
	c := &conn{
		socket:  socket,
		writes:  make(chan []byte),
		ended:   make(chan struct{}),
		waiting: make(map[uint64]chan *reply),
	}
	go c.write()
	go c.read()
	return c
}

func (c *conn) roundTrip(ctx context.Context, id uint64, body []byte) (*reply, error) {
	answer := make(chan *reply, 1)
	c.mu.Lock()
	c.waiting[id] = answer
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.waiting, id)
		c.mu.Unlock()
	}()
	// The writer writes a body that it has received as a whole: a cancelled call leaves no partial request on the connection.
	select {
	case c.writes <- body:
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-c.ended:
		return nil, &ConnectionError{c.why}
	}
	select {
	case reply := <-answer:
		return reply, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-c.ended:
		return nil, &ConnectionError{c.why}
	}
}

func (c *conn) write() {
	for {
		select {
		case body := <-c.writes:
			if _, err := c.socket.Write(body); err != nil {
				c.end(err)
				return
			}
		case <-c.ended:
			return
		}
	}
}

func (c *conn) read() {
	decoder := json.NewDecoder(c.socket)
	for {
		var r reply
		if err := decoder.Decode(&r); err != nil {
			c.end(fmt.Errorf("%w: %v", errEnded, err))
			return
		}
		if r.ID == nil {
			c.end(fmt.Errorf("the daemon did not understand: %w", r.refusal()))
			return
		}
		c.mu.Lock()
		answer := c.waiting[*r.ID]
		delete(c.waiting, *r.ID)
		c.mu.Unlock()
		// No caller waits for the reply to a cancelled call.
		if answer != nil {
			answer <- &r
		}
	}
}

// refusal returns the error of a reply that belongs to no request.
func (r *reply) refusal() error {
	if r.Error == nil {
		return errStray
	}
	return r.Error
}

// end ends the connection; the first reason stays.
func (c *conn) end(why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.why == nil {
		c.why = why
		close(c.ended)
		c.socket.Close()
	}
}

func (c *conn) hasEnded() bool {
	select {
	case <-c.ended:
		return true
	default:
		return false
	}
}
