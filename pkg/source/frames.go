package source

import (
	"errors"
	"hash/maphash"
	"io"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
)

// SupportedMediaTypes implements runtime.NegotiatedSerializer.
func (l lean) SupportedMediaTypes() []runtime.SerializerInfo {
	infos := append([]runtime.SerializerInfo(nil), l.NegotiatedSerializer.SupportedMediaTypes()...)
	for i := range infos {
		if infos[i].MediaType == runtime.ContentTypeProtobuf && infos[i].StreamSerializer != nil {
			stream := *infos[i].StreamSerializer
			stream.Framer = leanFramer{stream.Framer}
			infos[i].StreamSerializer = &stream
		}
	}
	return infos
}

type leanFramer struct{ runtime.Framer }

// NewFrameReader implements runtime.Framer.
func (f leanFramer) NewFrameReader(r io.ReadCloser) io.ReadCloser {
	return &frames{ReadCloser: f.Framer.NewFrameReader(r), delivered: time.Now(), seed: maphash.MakeSeed(), known: map[string]uint64{}}
}

// frames are the events of a watch in protobuf. Heartbeats end here: events of a Node that is in all that is read of it as it was in
// the event before. Nearly all events are such, and to decode one and hand it on costs several times what this comparison does.
// The reflector's resource version follows by the bookmarks, and by a heartbeat now and then, so that after a loss little is sent again.
type frames struct {
	io.ReadCloser // of the frames, as runtime.Framer has it
	frame, kept   []byte
	rest          []byte // of the frame that is being read
	reading       bool
	seed          maphash.Seed
	known         map[string]uint64 // hashes of what was read last, by the names of Nodes
	delivered     time.Time         // the newest event
}

// betweenHeartbeats is how long at most there is nothing but heartbeats until one of them is delivered.
const betweenHeartbeats = 10 * time.Second

// Read implements io.Reader as runtime.Framer has it: io.ErrShortBuffer says that there is more of the frame.
func (f *frames) Read(into []byte) (int, error) {
	for !f.reading {
		if err := f.next(); err != nil {
			return 0, err
		}
		f.rest, f.reading = f.frame, !f.heartbeat(f.frame) || time.Since(f.delivered) >= betweenHeartbeats
	}
	n := copy(into, f.rest)
	f.rest = f.rest[n:]
	if len(f.rest) > 0 {
		return n, io.ErrShortBuffer
	}
	f.reading, f.delivered = false, time.Now()
	return n, nil
}

const (
	firstFrame = 32 << 10 // bytes; holds most Nodes
	mostFrame  = 16 << 20 // more than client-go would decode
)

var errFrame = errors.New("an event of more than 16 MiB")

// next reads a whole frame.
func (f *frames) next() error {
	if f.frame == nil {
		f.frame = make([]byte, firstFrame)
	}
	f.frame = f.frame[:cap(f.frame)]
	for size := 0; ; {
		n, err := f.ReadCloser.Read(f.frame[size:])
		size += n
		switch {
		case err == nil:
			f.frame = f.frame[:size]
			return nil
		case !errors.Is(err, io.ErrShortBuffer):
			return err
		case size >= mostFrame:
			return errFrame
		}
		f.frame = append(f.frame[:size], make([]byte, size)...)
	}
}

// facts are all that is read of a Node but its resource version, which every event changes.
var facts = message{1: node[1].without(6), 2: node[2], 3: node[3]}

// heartbeat reports whether an event changes nothing, and remembers what it says.
func (f *frames) heartbeat(event []byte) bool {
	unknown, ok := cutMagic(first(first(event, 2), 1)) // object: raw
	if !ok || string(kindOf(unknown)) != "Node" {
		return false
	}
	object := first(unknown, 2) // raw
	name := first(first(object, 1), 1)
	f.kept = facts.appendTo(f.kept[:0], object)
	hash := maphash.Bytes(f.seed, f.kept)
	switch watch.EventType(first(event, 1)) {
	case watch.Modified:
		before, known := f.known[string(name)]
		if known && before == hash {
			return true
		}
		f.known[string(name)] = hash
	case watch.Added:
		f.known[string(name)] = hash
	case watch.Deleted:
		delete(f.known, string(name))
	}
	return false
}
