package agent

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// highestDescriptor is that of the files that this process has open.
func highestDescriptor(t *testing.T) (highest int) {
	t.Helper()
	open, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	for _, entry := range open {
		fd, err := strconv.Atoi(entry.Name())
		must(t, err)
		highest = max(highest, fd)
	}
	return highest
}

// limitDescriptors has this process run out of file descriptors at so many.
func limitDescriptors(t *testing.T, n int) {
	t.Helper()
	var before unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(n), Max: before.Max}))
	t.Cleanup(func() { must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &before)) })
}

// pinAgain pins the link of a pod for so many interfaces that there are not.
func pinAgain(t *testing.T, l *loop, e endpoint.Endpoint, n int) {
	t.Helper()
	pinned, err := link.LoadPinnedLink(l.cfg.BPFFS.Link(string(attach.FromPod), e.HostIndex), nil)
	must(t, err)
	defer pinned.Close()
	info, err := pinned.Info()
	must(t, err)
	for i := range n {
		again, err := link.NewFromID(info.ID)
		must(t, err)
		must(t, again.Pin(l.cfg.BPFFS.Link(string(attach.FromPod), 100000+i)))
		must(t, again.Close())
	}
}

// Of many more pods than there may be files open, one that loses its program gets it again at once, as of few.
func TestProgramIsRestoredWithFewDescriptors(t *testing.T) {
	priv.NeedTCX(t)
	l, e := withPod(t)
	most := 4 * highestDescriptor(t)
	pinAgain(t, l, e, most)
	limitDescriptors(t, most)
	for range 2 {
		if l.inspect(t.Context()) {
			t.Fatalf("called for a pass although nothing is missing: %v", l.failures(onTick))
		}
	}
	pinned, err := link.LoadPinnedLink(l.cfg.BPFFS.Link(string(attach.FromPod), e.HostIndex), nil)
	must(t, err)
	must(t, pinned.Detach())
	must(t, pinned.Close())
	if !l.inspect(t.Context()) || l.next != 0 {
		t.Errorf("the next pass begins in %v", l.next)
	}
	l.pass(t.Context())
	l.assertReady(t)
	l.assertWhole(t, e)
	if degraded := l.complaints.degraded(); len(degraded) > 0 {
		t.Errorf("degraded by %v", degraded)
	}
}

// Who has no file descriptors left is told what to do about it.
func TestNoDescriptorsLeft(t *testing.T) {
	priv.NeedTCX(t)
	l, _ := withPod(t)
	most := highestDescriptor(t) + 4
	limitDescriptors(t, most)
	for {
		fd, err := unix.Dup(0)
		if errors.Is(err, unix.EMFILE) {
			break
		}
		must(t, err)
		t.Cleanup(func() { _ = unix.Close(fd) })
	}
	l.inspect(t.Context())
	says := l.complaints.degraded()["endpoints/pass"]
	for _, part := range []string{unix.EMFILE.Error(), fmt.Sprintf("all %d files open that it may", most), "LimitNOFILE"} {
		if !strings.Contains(says, part) {
			t.Errorf("degraded by %q, which does not say %q", says, part)
		}
	}
}
