package source

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"path"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	"k8s.io/apimachinery/pkg/runtime"
)

// leanLists has lists in protobuf read object by object, and passes on only what the agent reads. API servers that can't
// stream a list in a watch send it in one piece, which in a large cluster takes more memory than all else that an agent has.
type leanLists struct{ next http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (l leanLists) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := l.next.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	resource := path.Base(r.URL.Path)
	object, known := leanItems[resource]
	lists := known && r.Method == http.MethodGet && r.URL.Query().Get("watch") == ""
	if lists && response.StatusCode == http.StatusOK && strings.HasPrefix(response.Header.Get("Content-Type"), runtime.ContentTypeProtobuf) {
		response.Body = &leanList{ReadCloser: response.Body, resource: resource, object: object}
		response.ContentLength = -1
		response.Header.Del("Content-Length")
	}
	return response, nil
}

// leanList is the body of an answer, of which what is kept is known with the first Read.
type leanList struct {
	io.ReadCloser
	resource string
	object   message
	kept     io.Reader
}

// Read implements io.Reader.
func (l *leanList) Read(into []byte) (int, error) {
	if l.kept == nil {
		kept, err := pruneList(l.ReadCloser, l.object)
		if err != nil {
			return 0, fmt.Errorf("read the list of %s: %w", l.resource, err)
		}
		l.kept = bytes.NewReader(kept)
	}
	return l.kept.Read(into)
}

// pruneList reads an encoded list of objects, and leaves out what nobody reads.
func pruneList(from io.Reader, object message) ([]byte, error) {
	magic := make([]byte, len(protobufMagic))
	if _, err := io.ReadFull(from, magic); err != nil {
		return nil, err
	}
	if !bytes.Equal(magic, protobufMagic) {
		return nil, fmt.Errorf("it begins with %q, want %q", magic, protobufMagic)
	}
	const levels = 1 // of messages above the objects, within the envelope
	kept, err := listed(object).read(from, levels)
	if err == nil && first(kept, 2) == nil {
		err = io.ErrUnexpectedEOF // else it would be a list of none
	}
	return slices.Concat(magic, kept), err
}

// read reads a message to its end and returns what is kept of it. So many levels of messages within it are read in the same
// way, field by field; of those below there is one at a time in memory.
func (m message) read(from io.Reader, levels int) (kept []byte, err error) {
	in := bufio.NewReader(from)
	var field bytes.Buffer
	for {
		number, size, err := header(in)
		if errors.Is(err, io.EOF) {
			return kept, nil
		}
		if err != nil {
			return nil, err
		}
		rest := &io.LimitedReader{R: in, N: size}
		inner, known := m[number]
		var content []byte
		switch {
		case !known:
			_, err = io.Copy(io.Discard, rest)
		case inner != nil && levels > 0:
			content, err = inner.read(rest, levels-1)
		default:
			field.Reset()
			_, err = field.ReadFrom(rest)
			if content = field.Bytes(); inner != nil {
				content = inner.appendTo(nil, content)
			}
		}
		if err == nil && rest.N > 0 {
			err = io.ErrUnexpectedEOF // a list that was cut off must not look complete
		}
		if err != nil {
			return nil, err
		}
		if known {
			kept = protowire.AppendBytes(protowire.AppendTag(kept, number, protowire.BytesType), content)
		}
	}
}

// header reads what is before the content of a field: its number and the content's size. io.EOF: there is no other field.
func header(in *bufio.Reader) (number protowire.Number, size int64, err error) {
	tag, err := binary.ReadUvarint(in)
	if err != nil {
		return 0, 0, err
	}
	number, kind := protowire.DecodeTag(tag)
	if kind != protowire.BytesType {
		return 0, 0, fmt.Errorf("field %d has wire type %d, want one with a size", number, kind)
	}
	length, err := binary.ReadUvarint(in)
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if err == nil && length > math.MaxInt64 {
		err = fmt.Errorf("field %d has a size of %d", number, length)
	}
	return number, int64(length), err //nolint:gosec // checked
}
