package aryk

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
)

// httpTransport makes each call by one HTTP POST request.
type httpTransport struct {
	url     string
	options options
}

func (t *httpTransport) roundTrip(ctx context.Context, _ uint64, body []byte) (*reply, error) {
	post, err := http.NewRequestWithContext(ctx, http.MethodPost, t.url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	post.Header.Set("Content-Type", "application/json")
	if t.options.hasPassword {
		post.SetBasicAuth(t.options.username, t.options.password)
	}
	response, err := t.options.http.Do(post)
	if err != nil {
		return nil, t.failure(ctx, err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, t.failure(ctx, err)
	}
	if response.StatusCode != http.StatusOK {
		return nil, &HTTPError{StatusCode: response.StatusCode, Status: response.Status}
	}
	var r reply
	if err := json.Unmarshal(text, &r); err != nil {
		return nil, &ConnectionError{err}
	}
	return &r, nil
}

func (t *httpTransport) failure(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return &ConnectionError{err}
}

func (t *httpTransport) close() error {
	t.options.http.CloseIdleConnections()
	return nil
}
