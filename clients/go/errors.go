package aryk

import (
	"encoding/json"
	"fmt"
	"syscall"
)

// Codes of JSON-RPC. Other codes are negated numbers of the system's.
const (
	CodeParse          = -32700
	CodeInvalidRequest = -32600
	CodeMethodNotFound = -32601
	CodeInvalidParams  = -32602
	CodeInternal       = -32603
	// CodeWrongState is that of a method that may not be called now.
	CodeWrongState = -1
)

// lastErrno is the greatest number that the kernel gives to an error.
const lastErrno = 4095

// Error is the daemon's. Where its code is the system's, [errors.Is] compares it with that: errors.Is(err, syscall.ENODEV), or
// errors.Is(err, fs.ErrExist).
type Error struct {
	Code int `json:"code"`
	// Message is the text that belongs to the code.
	Message string `json:"message"`
	// Data says what was wrong with what: mostly a text.
	Data json.RawMessage `json:"data"`
}

// Error is the message with what is known beyond it.
func (e *Error) Error() string {
	if detail := e.Detail(); detail != "" {
		return fmt.Sprintf("%s: %s (%d)", e.Message, detail, e.Code)
	}
	return fmt.Sprintf("%s (%d)", e.Message, e.Code)
}

// Detail is the data as text.
func (e *Error) Detail() string {
	var text string
	if json.Unmarshal(e.Data, &text) == nil {
		return text
	}
	return string(e.Data)
}

// Unwrap gives the system's error of that code, if it is one.
func (e *Error) Unwrap() error {
	if e.Code >= -lastErrno && e.Code < CodeWrongState {
		return syscall.Errno(-e.Code)
	}
	return nil
}

// ConnectionError says that the daemon cannot be reached, or went away: whether the call was carried out is not known.
type ConnectionError struct {
	Err error
}

// Error says why.
func (e *ConnectionError) Error() string {
	return "no connection: " + e.Err.Error()
}

// Unwrap gives the cause.
func (e *ConnectionError) Unwrap() error {
	return e.Err
}

// HTTPError is an answer of HTTP that is no answer of the daemon's: a wrong password is 401.
type HTTPError struct {
	StatusCode int
	Status     string
}

// Error gives the status.
func (e *HTTPError) Error() string {
	return "HTTP " + e.Status
}
