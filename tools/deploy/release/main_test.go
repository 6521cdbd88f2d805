package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/v2/loader"

	"github.com/ebpf-cni/ebpf-cni/tools/deploy"
)

const image = "registry.example/ebpf-cni:v1.2.3"

// release writes one with a version, and returns its directory.
func release(t *testing.T, version string) string {
	t.Helper()
	dir, out := filepath.Join(t.TempDir(), "amd64"), filepath.Join(t.TempDir(), "dist")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"ebpf-agent", "ebpf-cni", "ebpfctl"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name+" itself"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := run([]string{"-from", "..", "-image", image, "-version", version, "-out", out, dir}); err != nil {
		t.Fatal(err)
	}
	return out
}

func read(t *testing.T, dir, name string) []byte {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return content
}

// The manifests and the chart name the image that is released with them, and no other.
func TestReleaseNamesItsImage(t *testing.T) {
	dir := release(t, "v1.2.3")
	chart := filepath.Join(dir, "ebpf-cni-chart.tgz")
	for manifest, values := range map[string]map[string]any{
		"ebpf-cni.yaml": {"restartOnChange": false}, "cleanup.yaml": {"cleanup": true},
	} {
		text := string(read(t, dir, manifest))
		if !strings.Contains(text, "image: "+image+"\n") || strings.Contains(text, defaultImage) {
			t.Errorf("%s does not name %s alone:\n%s", manifest, image, text)
		}
		rendered, err := deploy.Render(t.Context(), chart, values)
		if err != nil {
			t.Fatal(err)
		}
		for template, want := range rendered {
			if !strings.HasSuffix(text, want) {
				t.Errorf("%s is not what the released chart makes of %s:\n%s", manifest, template, want)
			}
		}
	}
}

// Helm takes no chart without a semantic version, and a commit has none.
func TestChartVersion(t *testing.T) {
	for version, want := range map[string]string{
		"v1.2.3": "1.2.3", "v1.2.3-4-gabcdef0-dirty": "1.2.3-4-gabcdef0-dirty", "12e4567": "0.1.0+12e4567", "unknown": "0.1.0+unknown",
	} {
		chart, err := loader.Load(filepath.Join(release(t, version), "ebpf-cni-chart.tgz"))
		if err != nil {
			t.Fatal(err)
		}
		if err := chart.Validate(); err != nil {
			t.Errorf("%s: %v", version, err)
		}
		if chart.Metadata.Version != want || chart.Metadata.AppVersion != version {
			t.Errorf("%s: chart %s of %s, want %s", version, chart.Metadata.Version, chart.Metadata.AppVersion, want)
		}
	}
}

// entries reads an archive: headers and content, by name.
func entries(t *testing.T, archive []byte) (heads map[string]*tar.Header, contents map[string]string) {
	t.Helper()
	heads, contents = map[string]*tar.Header{}, map[string]string{}
	zip, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		t.Fatal(err)
	}
	r := tar.NewReader(zip)
	for head, err := r.Next(); err != io.EOF; head, err = r.Next() {
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		heads[head.Name], contents[head.Name] = head, string(content)
	}
	return heads, contents
}

func TestBinaries(t *testing.T) {
	heads, contents := entries(t, read(t, release(t, "v1.2.3"), "ebpf-cni-linux-amd64.tgz"))
	for name, head := range heads {
		if head.Mode != 0o755 || contents[name] != name+" itself" {
			t.Errorf("%s: mode %o, %q", name, head.Mode, contents[name])
		}
	}
	if got := strings.Join(slices.Sorted(maps.Keys(heads)), " "); got != "ebpf-agent ebpf-cni ebpfctl" {
		t.Errorf("it holds %s", got)
	}
}

// A host's files are unpacked over its root: nothing but files goes there, and those that it has to read.
func TestHostFiles(t *testing.T) {
	out := release(t, "v1.2.3")
	for archive, names := range map[string][]string{
		"host":   {"etc/systemd/network/00-ebpf-cni.network", "etc/systemd/networkd.conf.d/ebpf-cni.conf", "etc/NetworkManager/conf.d/ebpf-cni.conf"},
		"docker": {"etc/systemd/system/ebpf-agent.service", "etc/systemd/system/docker.service.d/ebpf-cni.conf", "etc/default/ebpf-agent"},
	} {
		heads, contents := entries(t, read(t, out, "ebpf-cni-"+archive+".tgz"))
		for _, name := range names {
			if heads[name] == nil || heads[name].Mode != 0o644 || contents[name] != string(read(t, filepath.Join("..", archive), name)) {
				t.Errorf("%s of %s: %+v, %q", name, archive, heads[name], contents[name])
			}
			delete(heads, name)
		}
		if len(heads) > 0 {
			t.Errorf("%s also holds %v", archive, slices.Collect(maps.Keys(heads)))
		}
	}
}

func TestSameBytes(t *testing.T) {
	first, second := release(t, "v1.2.3"), release(t, "v1.2.3")
	for _, name := range []string{"ebpf-cni-chart.tgz", "ebpf-cni-host.tgz", "ebpf-cni-docker.tgz", "ebpf-cni-linux-amd64.tgz"} {
		if !bytes.Equal(read(t, first, name), read(t, second, name)) {
			t.Errorf("two releases of the same files differ in %s", name)
		}
	}
}
