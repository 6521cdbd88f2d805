package device

import (
	"errors"
	"io/fs"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

func TestDoComesBack(t *testing.T) {
	ns := newNS(t)
	home, err := CurrentNetNS()
	must(t, err)
	defer home.Close()
	must(t, ns.Do(func() error {
		inside, err := CurrentNetNS()
		must(t, err)
		defer inside.Close()
		if same, err := ns.Same(inside); err != nil || !same {
			t.Errorf("inside: same %v, %v", same, err)
		}
		return nil
	}))
	if same, err := ns.Same(home); err != nil || same {
		t.Errorf("the caller's thread is inside: %v, %v", same, err)
	}
	wrong := errors.New("wrong")
	if err := ns.Do(func() error { return wrong }); err != wrong {
		t.Errorf("error %v, want the function's own", err)
	}
	if err := ns.Do(func() error { runtime.Goexit(); return nil }); !errors.Is(err, errGoexit) {
		t.Errorf("Goexit: %v", err)
	}
}

func TestDoLeavesNoThreadBehind(t *testing.T) {
	ns := newNS(t)
	home, err := CurrentNetNS()
	must(t, err)
	defer home.Close()
	for range 20 {
		must(t, ns.Do(func() error { return nil }))
	}
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() { // each on a thread of its own, so that none of the runtime's is missed
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			here, err := CurrentNetNS()
			if err != nil {
				t.Error(err)
				return
			}
			defer here.Close()
			if same, err := here.Same(home); err != nil || !same {
				t.Errorf("a thread stayed in the other namespace (%v)", err)
			}
			time.Sleep(time.Millisecond) // keeps the thread while the others look for theirs
		})
	}
	wg.Wait()
}

func TestOpenNetNSRefusesOtherFiles(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	must(t, unix.Mkfifo(fifo, 0o600))
	for _, path := range []string{dir, fifo, "/dev/null", "/proc/self/ns/mnt", "/proc/self/stat"} {
		done := make(chan error, 1)
		go func() { _, err := OpenNetNS(path); done <- err }()
		select {
		case err := <-done:
			if !errors.Is(err, ErrNotNetNS) {
				t.Errorf("%s: error %v, want ErrNotNetNS", path, err)
			}
		case <-time.After(priv.Patience(5 * time.Second)):
			t.Fatalf("%s: opening it hangs", path)
		}
	}
	if _, err := OpenNetNS(filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
}
