package aryk

import (
	"encoding/json"
	"fmt"
	"syscall"
)

// Codes of JSON-RPC. Other codes are negated errnos.
const (
	CodeParse          = -32700
	CodeInvalidRequest = -32600
	CodeMethodNotFound = -32601
	CodeInvalidParams  = -32602
	CodeInternal       = -32603
	// CodeWrongState is the code of a method that may not be called in the present state.
	CodeWrongState = -1
)

// lastErrno is the greatest errno of the kernel.
const lastErrno = 4095

// Error is an error of the daemon. If its code is an errno, [errors.Is] compares it with that errno: errors.Is(err, syscall.ENODEV), or
// errors.Is(err, fs.ErrExist).
type Error struct {
	Code int `json:"code"`
	// Message is the text that belongs to the code.
	Message string `json:"message"`
	// Data describes the error: mostly a text.
	Data json.RawMessage `json:"data"`
}

// Error returns the message, the detail and the code.
func (e *Error) Error() string {
	if detail := e.Detail(); detail != "" {
		return fmt.Sprintf("%s: %s (%d)", e.Message, detail, e.Code)
	}
	return fmt.Sprintf("%s (%d)", e.Message, e.Code)
}

// Detail returns the data as text.
func (e *Error) Detail() string {
	var text string
	if json.Unmarshal(e.Data, &text) == nil {
		return text
	}
	return string(e.Data)
}

// Unwrap returns the errno of the code, or nil if the code is none.
func (e *Error) Unwrap() error {
	if e.Code >= -lastErrno && e.Code < CodeWrongState {
		return syscall.Errno(-e.Code)
	}
	return nil
}

// ConnectionError reports that the daemon cannot be reached, or closed the connection; the call may have been carried out.
type ConnectionError struct {
	Err error
}

// Error returns the reason.
func (e *ConnectionError) Error() string {
	return "no connection: " + e.Err.Error()
}

// Unwrap returns the cause.
func (e *ConnectionError) Unwrap() error {
	return e.Err
}

// HTTPError is an HTTP error status instead of a JSON-RPC answer: a wrong password gives 401.
type HTTPError struct {
	StatusCode int
	Status     string
}

// Error returns the status.
func (e *HTTPError) Error() string {
	return "HTTP " + e.Status
}
