package attach

import (
	"errors"
	"fmt"
	"io/fs"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// Watch looks at the pinned links of one hook again and again. It keeps them open, because to open one costs ten times what it
// costs to ask. So a link whose pin is removed stays attached until the next look. Several goroutines may use it.
type Watch struct {
	Dir  bpffs.Dir
	Hook Hook

	mu   sync.Mutex
	open map[int]int // descriptors, by interface
}

// Look returns which program is attached to an interface by a pinned link, by the index of the interface; 0: none.
func (w *Watch) Look() (map[int]ebpf.ProgramID, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	places, err := PinnedLinks(w.Dir)
	if err != nil {
		return nil, err
	}
	found := make(map[int]ebpf.ProgramID, len(places))
	for _, at := range places {
		if at.Hook != w.Hook {
			continue
		}
		info, err := w.ask(at)
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // it was removed meanwhile
			return nil, fmt.Errorf("read link %s: %w", w.Dir.Link(string(at.Hook), at.Ifindex), err)
		}
		found[at.Ifindex] = 0
		if info.kind == linkTCX && int(info.ifindex) == at.Ifindex {
			found[at.Ifindex] = info.program
		}
	}
	for index := range w.open {
		if _, pinned := found[index]; !pinned {
			w.close(index)
		}
	}
	return found, nil
}

func (w *Watch) ask(at Place) (info linkInfo, err error) {
	fd, open := w.open[at.Ifindex]
	if !open {
		if fd, err = openLinkFD(w.Dir.Link(string(at.Hook), at.Ifindex)); err != nil {
			return info, err
		}
		if w.open == nil {
			w.open = map[int]int{}
		}
		w.open[at.Ifindex] = fd
	}
	return askLink(fd)
}

// Forget is for an interface on which another link may have been pinned.
func (w *Watch) Forget(ifindex int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.close(ifindex)
}

// Close forgets all of them.
func (w *Watch) Close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for index := range w.open {
		w.close(index)
	}
}

func (w *Watch) close(ifindex int) {
	if fd, open := w.open[ifindex]; open {
		_ = unix.Close(fd)
		delete(w.open, ifindex)
	}
}
