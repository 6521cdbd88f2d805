package cluster

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// An image says what runs in it, and where; what several stand on is in their file once.
func TestArchiveOfImages(t *testing.T) {
	dir := t.TempDir()
	file := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	base, program := file("base.tar", string(make([]byte, 1024))), file("program", "#!")
	const alone, based, bare = "test/alone:1", "test/based:1", "test/bare:1"
	archive := filepath.Join(dir, "images.tar")
	err := writeArchive(map[string]Image{
		alone: {Programs: []string{program}},
		based: {Base: base, Programs: []string{program, base}, Command: []string{"pause"}, Path: "/usr/bin"},
		bare:  {Base: base, Command: []string{"sh"}},
	}, archive)
	if err != nil {
		t.Fatal(err)
	}
	shared := map[v1.Hash]int{}
	for text, want := range map[string]struct {
		layers           int
		entry, cmd, path []string
	}{
		alone: {1, []string{"/program"}, nil, []string{"PATH=/"}},
		based: {2, []string{"/program"}, []string{"pause"}, []string{"PATH=/usr/bin"}},
		bare:  {2, nil, []string{"sh"}, []string{"PATH=/"}},
	} {
		tag, err := name.NewTag(text)
		if err != nil {
			t.Fatal(err)
		}
		image, err := tarball.ImageFromPath(archive, &tag)
		if err != nil {
			t.Fatal(err)
		}
		config, err := image.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		got := config.Config
		if !slices.Equal(got.Entrypoint, want.entry) || !slices.Equal(got.Cmd, want.cmd) || !slices.Equal(got.Env, want.path) {
			t.Errorf("%s: entry point %q, command %q, environment %q", text, got.Entrypoint, got.Cmd, got.Env)
		}
		if n := len(config.RootFS.DiffIDs); n != want.layers {
			t.Errorf("%s: %d layers, want %d", text, n, want.layers)
		}
		shared[config.RootFS.DiffIDs[0]]++
	}
	if len(shared) != 2 {
		t.Errorf("the images begin with %d different layers, want 2", len(shared))
	}
}
