package source

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

const (
	// readDelay is how long a file must have been left alone before it is read: a writer that
	// does not rename leaves it empty or cut off for a moment.
	readDelay = 20 * time.Millisecond
	// maxReadDelay bounds the wait for that.
	maxReadDelay = time.Second
	// pollInterval is how often the file is read without any notification. Notifications
	// don't come from network file systems nor when inotify has no instance left.
	pollInterval = 2 * time.Second
)

// File reads Nodes from a file and follows its changes, a rename over it and the
// swap of a symbolic link on its path included.
type File struct {
	Path string
	Log  *slog.Logger
	// Services gets what else the file contains; nil: nobody asks.
	Services *FileServices
	// Heard is called each time the file has been looked at and is fine; nil: nobody asks.
	Heard func()
}

// Run delivers the content of the file now and after each change, until ctx
// ends. Content that is no list of Nodes is reported once as an Update with an
// error. Run itself fails only with the context's error.
func (f File) Run(ctx context.Context, deliver func(Update)) error {
	w := &fileWatch{path: f.Path, deliver: deliver, heard: f.Heard, services: f.Services}
	var events <-chan fsnotify.Event
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		f.Log.Warn("the nodes file can't be watched, reading it periodically", "file", f.Path, "error", err)
	} else {
		defer watcher.Close()
		w.watcher, events = watcher, watcher.Events
	}
	w.look()
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	var rest <-chan time.Time
	var since time.Time
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case event := <-events:
			if !w.lookups[event.Name] {
				continue
			}
			if rest == nil {
				since = time.Now()
			}
			if rest == nil || time.Since(since) < maxReadDelay {
				rest = time.After(readDelay)
			}
		case <-rest:
			rest = nil
			w.look()
		case <-ticker.C:
			w.look()
		case err := <-w.errors():
			f.Log.Debug("nodes file notification", "error", err)
		}
	}
}

// fileWatch is the state of one Run.
type fileWatch struct {
	path     string
	watcher  *fsnotify.Watcher
	deliver  func(Update)
	heard    func()
	services *FileServices
	lookups  map[string]bool   // paths at which a change may change the file
	seen     [sha256.Size]byte // of the content that was last judged
	stamp    stamp
	lastErr  string
	nodes    []plan.Node // that were delivered last
}

// stamp identifies a file's content without reading it.
type stamp struct {
	info os.FileInfo
}

func (s stamp) same(info os.FileInfo) bool {
	return s.info != nil && os.SameFile(s.info, info) &&
		s.info.Size() == info.Size() && s.info.ModTime().Equal(info.ModTime())
}

func (w *fileWatch) errors() <-chan error {
	if w.watcher == nil {
		return nil
	}
	return w.watcher.Errors
}

// look finds out where the file is, and whether its content is new.
func (w *fileWatch) look() {
	w.follow()
	w.read()
	if w.lastErr == "" && w.heard != nil {
		w.heard()
	}
}

// follow watches every directory in which a rename could change what the path
// leads to.
func (w *fileWatch) follow() {
	if w.watcher == nil {
		return
	}
	want := map[string]bool{}
	w.lookups = map[string]bool{}
	for _, looked := range lookups(w.path) {
		w.lookups[looked] = true
		want[filepath.Dir(looked)] = true
	}
	for _, have := range w.watcher.WatchList() {
		if !want[have] {
			_ = w.watcher.Remove(have) // gone already, then
		}
		delete(want, have)
	}
	for dir := range want {
		_ = w.watcher.Add(dir) // not there yet: the periodic pass tries again
	}
}

// read delivers the content if it is new.
func (w *fileWatch) read() {
	info, err := os.Stat(w.path)
	if err == nil && w.stamp.same(info) && time.Since(info.ModTime()) > pollInterval {
		return
	}
	content, err := readAll(w.path)
	if err != nil {
		// Whatever comes back counts as new, the same content included.
		w.seen, w.stamp = [sha256.Size]byte{}, stamp{}
		w.fail(err)
		return
	}
	w.stamp = stamp{info}
	sum := sha256.Sum256(content)
	if sum == w.seen {
		return
	}
	w.seen = sum
	all, err := parse(content, w.services != nil)
	if err != nil {
		w.fail(fmt.Errorf("%s: %w", w.path, err))
		return
	}
	if w.lastErr != "" || !slices.EqualFunc(all.nodes, w.nodes, plan.Node.Equal) {
		w.nodes, w.lastErr = all.nodes, ""
		w.deliver(Update{Nodes: all.nodes, Changed: time.Now()})
	}
	if w.services != nil {
		w.services.replace(all)
	}
}

// fail reports a state that can't be used, once.
func (w *fileWatch) fail(err error) {
	if err.Error() == w.lastErr {
		return
	}
	w.lastErr = err.Error()
	w.deliver(Update{Err: err, Changed: time.Now()})
	if w.services != nil {
		w.services.fail(err)
	}
}

func readAll(path string) ([]byte, error) {
	f, err := os.Open(path) //nolint:gosec // the path is the administrator's
	if err != nil {
		return nil, err
	}
	defer f.Close()
	content, err := io.ReadAll(io.LimitReader(f, maxContent+1))
	if err == nil && len(content) > maxContent {
		err = fmt.Errorf("%s: longer than %d bytes", path, maxContent)
	}
	return content, err
}

// lookups lists the paths at which a rename or a write can change what the file
// contains: every symbolic link on the way, followed one by one, and the file.
func lookups(path string) []string {
	const maxLinks = 40 // the kernel's own limit
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil
	}
	var looked []string
	todo := components(abs)
	at := "/"
	for links := 0; len(todo) > 0; {
		next := filepath.Join(at, todo[0])
		todo = todo[1:]
		target, err := os.Readlink(next)
		if err != nil {
			if len(todo) == 0 {
				looked = append(looked, next)
			}
			at = next
			continue
		}
		looked = append(looked, next)
		if links++; links > maxLinks {
			return looked
		}
		if filepath.IsAbs(target) {
			at = "/"
		}
		todo = append(components(target), todo...)
	}
	return looked
}

func components(path string) []string {
	return strings.FieldsFunc(path, func(r rune) bool { return r == '/' })
}
