package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
)

// binariesFor makes a directory of binaries that differ by platform.
func binariesFor(t *testing.T, arch string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range binaries {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name+" for "+arch), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// makeArchive builds an archive and returns its path.
func makeArchive(t *testing.T, args ...string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "image.tar")
	if err := run(append([]string{"-out", out}, args...), io.Discard); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestSameBytes(t *testing.T) {
	first := makeArchive(t, "amd64="+binariesFor(t, "amd64"), "arm64="+binariesFor(t, "arm64"))
	second := makeArchive(t, "amd64="+binariesFor(t, "amd64"), "arm64="+binariesFor(t, "arm64"))
	a, b := read(t, first), read(t, second)
	if !bytes.Equal(a, b) {
		t.Error("two builds of the same binaries differ")
	}
	other := makeArchive(t, "amd64="+binariesFor(t, "other"), "arm64="+binariesFor(t, "arm64"))
	if bytes.Equal(a, read(t, other)) {
		t.Error("other binaries make the same image")
	}
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

// TestArchive reads the archive as one that loads it does.
func TestArchive(t *testing.T) {
	path := makeArchive(t, "-name", "registry.example/net/ebpf-cni:v1", "-version", "v1",
		"amd64="+binariesFor(t, "amd64"), "arm64="+binariesFor(t, "arm64"))
	archive, err := layout.ImageIndexFromPath(unpack(t, path))
	if err != nil {
		t.Fatal(err)
	}
	top, err := archive.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	if len(top.Manifests) != 1 || top.Manifests[0].Annotations[imageName] != "registry.example/net/ebpf-cni:v1" {
		t.Fatalf("the archive holds %+v", top.Manifests)
	}
	index, err := archive.ImageIndex(top.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	var archs []string
	for _, m := range manifest.Manifests {
		archs = append(archs, m.Platform.Architecture)
		img, err := index.Image(m.Digest)
		if err != nil {
			t.Fatal(err)
		}
		checkImage(t, img, m.Platform.Architecture)
	}
	if got := strings.Join(archs, " "); got != "amd64 arm64" {
		t.Errorf("platforms %q", got)
	}
}

func checkImage(t *testing.T, img v1.Image, arch string) {
	t.Helper()
	file, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if file.OS != "linux" || file.Architecture != arch || strings.Join(file.Config.Entrypoint, " ") != "/bin/ebpf-agent" ||
		strings.Join(file.Config.Env, " ") != "PATH=/bin" || file.Config.Labels["org.opencontainers.image.version"] != "v1" {
		t.Errorf("%s: %+v", arch, file)
	}
	layers, err := img.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("%d layers, %v", len(layers), err)
	}
	content, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer content.Close()
	r, seen := tar.NewReader(content), map[string]string{}
	for head, err := r.Next(); err != io.EOF; head, err = r.Next() {
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if head.Mode != 0o755 || head.Uid != 0 {
			t.Errorf("%s: mode %o, owner %d", head.Name, head.Mode, head.Uid)
		}
		seen[head.Name] = string(body)
	}
	for _, name := range binaries {
		if seen["bin/"+name] != name+" for "+arch {
			t.Errorf("%s: bin/%s holds %q", arch, name, seen["bin/"+name])
		}
	}
}

// unpack returns the directory that the archive holds.
func unpack(t *testing.T, path string) string {
	t.Helper()
	dir, r := t.TempDir(), tar.NewReader(bytes.NewReader(read(t, path)))
	for {
		head, err := r.Next()
		if err == io.EOF {
			return dir
		}
		if err != nil {
			t.Fatal(err)
		}
		to := filepath.Join(dir, filepath.Clean("/"+head.Name))
		if head.Typeflag == tar.TypeDir {
			err = os.MkdirAll(to, 0o755)
		} else {
			var content []byte
			if content, err = io.ReadAll(r); err == nil {
				err = os.WriteFile(to, content, 0o600)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestRefused(t *testing.T) {
	good := "amd64=" + binariesFor(t, "amd64")
	for want, args := range map[string][]string{
		"no platform given":       {"-out", "x"},
		`"amd64" is no ARCH=`:     {"-out", "x", "amd64"},
		"-out: not given":         {good},
		"no such file":            {"-out", filepath.Join(t.TempDir(), "x"), "amd64=" + t.TempDir()},
		`-name "a b"`:             {"-out", filepath.Join(t.TempDir(), "x"), "-name", "a b", good},
		"such as amd64=bin/amd64": {"-out", "x", "=bin"},
	} {
		err := run(args, io.Discard)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q", args, err, want)
		}
	}
}

// The Dockerfile must make the same image.
func TestDockerfile(t *testing.T) {
	content := string(read(t, "../Dockerfile"))
	entry, err := json.Marshal([]string{binDir + "/" + binaries[0]})
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"FROM scratch", "COPY --from=build /out/ " + binDir + "/", "ENV PATH=" + binDir, "ENTRYPOINT " + string(entry)} {
		if !strings.Contains(content, line+"\n") {
			t.Errorf("the Dockerfile lacks %q", line)
		}
	}
}
