package source

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// within is how long a change may take to arrive: far below the periodic pass,
// so that a test passes only by notification.
const within = pollInterval * 3 / 4

func names(nodes []plan.Node) string {
	var out []string
	for _, n := range nodes {
		out = append(out, n.Name)
	}
	return strings.Join(out, " ")
}

func content(names ...string) string {
	var items []string
	for _, n := range names {
		items = append(items, "{metadata: {name: "+n+"}}")
	}
	return listOf(items...)
}

// watchFile runs a File until the test ends.
func watchFile(t *testing.T, path string) <-chan Update {
	t.Helper()
	updates := make(chan Update, 100)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- File{Path: path, Log: slog.New(slog.DiscardHandler)}.Run(ctx, func(u Update) { updates <- u })
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != context.Canceled {
			t.Errorf("Run ended with %v", err)
		}
	})
	return updates
}

func next(t *testing.T, updates <-chan Update) Update {
	t.Helper()
	select {
	case u := <-updates:
		return u
	case <-time.After(within):
		t.Fatal("no update")
		panic("unreachable")
	}
}

func expect(t *testing.T, updates <-chan Update, want string) {
	t.Helper()
	if u := next(t, updates); u.Err != nil || names(u.Nodes) != want {
		t.Fatalf("got %q, error %v, want %q", names(u.Nodes), u.Err, want)
	}
}

// write puts text into a file in place: at one stroke, unless the file is made, or made shorter and not empty.
func write(t *testing.T, path, text string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
	must(t, err)
	_, err = f.WriteAt([]byte(text), 0)
	must(t, errors.Join(err, f.Truncate(int64(len(text))), f.Close()))
}

// replace puts a file with that text into a file's place.
func replace(t *testing.T, path, text string) {
	t.Helper()
	write(t, path+".new", text)
	must(t, os.Rename(path+".new", path))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestFileFollowsWritesAndRenames(t *testing.T) {
	path := filepath.Join(t.TempDir(), "nodes.yaml")
	write(t, path, content("a"))
	updates := watchFile(t, path)
	expect(t, updates, "a")
	write(t, path, content("a", "b"))
	expect(t, updates, "a b")
	replace(t, path, content("c"))
	expect(t, updates, "c")
	// The new inode is followed as well.
	write(t, path, content("d"))
	expect(t, updates, "d")
}

// A writer that does not rename leaves the file empty for a moment, which is nobody's list of Nodes.
func TestFileWaitsForItsWriter(t *testing.T) {
	path := filepath.Join(t.TempDir(), "nodes.yaml")
	write(t, path, content("a"))
	updates := watchFile(t, path)
	expect(t, updates, "a")
	for i := range 20 {
		name := fmt.Sprint("b", i)
		time.Sleep(2 * readDelay) // nothing of the try before is waited for still
		began := time.Now()
		must(t, os.Truncate(path, 0))
		time.Sleep(readDelay / 4)
		write(t, path, content(name))
		quick := time.Since(began) < readDelay
		u := next(t, updates)
		if quick {
			if u.Err != nil || names(u.Nodes) != name {
				t.Fatalf("got %q, error %v, want %q", names(u.Nodes), u.Err, name)
			}
			return
		}
		if u.Err != nil {
			expect(t, updates, name)
		}
	}
	t.Fatalf("this machine has never written the file within %v", readDelay)
}

func TestFileFollowsAConfigMap(t *testing.T) {
	dir := t.TempDir()
	version := func(name string, nodes ...string) {
		must(t, os.Mkdir(filepath.Join(dir, name), 0o755))
		write(t, filepath.Join(dir, name, "nodes.yaml"), content(nodes...))
		must(t, os.Symlink(name, filepath.Join(dir, "..data_tmp")))
		must(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	}
	version("..1", "a")
	path := filepath.Join(dir, "nodes.yaml")
	must(t, os.Symlink("..data/nodes.yaml", path))
	updates := watchFile(t, path)
	expect(t, updates, "a")
	version("..2", "b")
	expect(t, updates, "b")
	must(t, os.RemoveAll(filepath.Join(dir, "..1")))
	version("..3", "c")
	expect(t, updates, "c")
}

func TestFileFollowsALinkFurtherUp(t *testing.T) {
	dir := t.TempDir()
	for _, v := range []string{"a", "b"} {
		must(t, os.MkdirAll(filepath.Join(dir, "releases", v), 0o755))
		write(t, filepath.Join(dir, "releases", v, "nodes.yaml"), content(v))
	}
	must(t, os.Symlink("releases/a", filepath.Join(dir, "current")))
	updates := watchFile(t, filepath.Join(dir, "current", "nodes.yaml"))
	expect(t, updates, "a")
	must(t, os.Symlink("releases/b", filepath.Join(dir, "next")))
	must(t, os.Rename(filepath.Join(dir, "next"), filepath.Join(dir, "current")))
	expect(t, updates, "b")
}

func TestFileReportsWhatCanNotBeUsed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "nodes.yaml")
	write(t, path, content("a"))
	updates := watchFile(t, path)
	expect(t, updates, "a")
	for _, bad := range []struct{ text, want string }{
		{"", "empty"},
		{"{{{", "neither YAML nor JSON"},
		{"apiVersion: v1\nkind: PodList\nitems:\n- {}\n", "PodList"},
		{listOf("{metadata: {name: x}}", "{}"), "items[1]"},
	} {
		write(t, path, bad.text)
		u := next(t, updates)
		if u.Err == nil || u.Nodes != nil || !strings.Contains(u.Err.Error(), bad.want) || !strings.Contains(u.Err.Error(), path) {
			t.Fatalf("content %q: %q, error %v", bad.text, names(u.Nodes), u.Err)
		}
	}
	must(t, os.Remove(path))
	if u := next(t, updates); u.Err == nil || !os.IsNotExist(u.Err) {
		t.Fatalf("file removed: %v", u.Err)
	}
	// The content of before is good again.
	replace(t, path, content("a"))
	expect(t, updates, "a")
}

func TestFileIgnoresTheSameContent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "nodes.yaml")
	write(t, path, content("a"))
	updates := watchFile(t, path)
	expect(t, updates, "a")
	write(t, path, content("a"))
	write(t, path+".other", "neighbour")
	select {
	case u := <-updates:
		t.Fatalf("delivered again: %q, %v", names(u.Nodes), u.Err)
	case <-time.After(10 * readDelay):
	}
}
