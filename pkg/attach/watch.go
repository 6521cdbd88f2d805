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
// costs to ask, but never by more than half of the file descriptors that the process may have. So a link whose pin is removed
// may stay attached until the next look. Several goroutines may use it.
type Watch struct {
	Dir  bpffs.Dir
	Hook Hook

	mu   sync.Mutex
	open map[int]int // descriptors, by interface
}

// Unread stands for the program of a link that could not be read.
const Unread = ^ebpf.ProgramID(0)

// Look returns which program is attached to an interface by a pinned link, by the index of the interface; 0: none. The
// error is that of a link that could not be read; without a result none could.
func (w *Watch) Look() (found map[int]ebpf.ProgramID, failed error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	places, err := PinnedLinks(w.Dir)
	if err != nil {
		return nil, err
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return nil, fmt.Errorf("get the limit of open files: %w", err)
	}
	found = make(map[int]ebpf.ProgramID, len(places))
	for _, at := range places {
		if at.Hook != w.Hook {
			continue
		}
		info, err := w.ask(at, limit.Cur/2)
		switch {
		case err != nil && !errors.Is(err, fs.ErrNotExist):
			found[at.Ifindex], failed = Unread, fmt.Errorf("read link %s: %w", w.Dir.Link(string(at.Hook), at.Ifindex), err)
		case info.kind == linkTCX && int(info.ifindex) == at.Ifindex:
			found[at.Ifindex] = info.program
		default: // detached, or removed meanwhile
			found[at.Ifindex] = 0
		}
	}
	for index := range w.open {
		if _, pinned := found[index]; !pinned {
			w.close(index)
		}
	}
	return found, failed
}

// ask asks for a link, which stays open if no more than most are.
func (w *Watch) ask(at Place, most uint64) (linkInfo, error) {
	if fd, open := w.open[at.Ifindex]; open {
		return askLink(fd)
	}
	path := w.Dir.Link(string(at.Hook), at.Ifindex)
	if uint64(len(w.open)) >= most {
		return readLink(path)
	}
	fd, err := openLinkFD(path)
	if err != nil {
		return linkInfo{}, err
	}
	if w.open == nil {
		w.open = map[int]int{}
	}
	w.open[at.Ifindex] = fd
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
