package main

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// binDir is where the binaries are in the image. The agent installs the plugin
// from beside itself.
const binDir = "/bin"

// binaries are what the image holds; the first is its entry point.
var binaries = []string{"ebpf-agent", "ebpf-cni", "ebpfctl"}

// epoch is the time of everything in the image, so that it says nothing of when
// it was built.
var epoch = time.Unix(0, 0).UTC()

// build makes one image per platform and an index of them.
func build(platforms []platform, version string) (v1.ImageIndex, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, p := range platforms {
		img, err := buildImage(p, version)
		if err != nil {
			return nil, fmt.Errorf("build the image for %s: %w", p.arch, err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add:        img,
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: p.arch}},
		})
	}
	return index, nil
}

func buildImage(p platform, version string) (v1.Image, error) {
	content, err := layer(p.dir)
	if err != nil {
		return nil, err
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(content)), nil
	}, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err := mutate.Append(base, mutate.Addendum{
		Layer:   l,
		History: v1.History{Created: v1.Time{Time: epoch}, CreatedBy: "tools/deploy/image"},
	})
	if err != nil {
		return nil, err
	}
	file, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	file = file.DeepCopy()
	// Without a platform, containerd does not find the image.
	file.OS, file.Architecture, file.Created = "linux", p.arch, v1.Time{Time: epoch}
	file.Config = v1.Config{
		Entrypoint: []string{path.Join(binDir, binaries[0])},
		Env:        []string{"PATH=" + binDir},
		Labels:     map[string]string{"org.opencontainers.image.version": version},
	}
	return mutate.ConfigFile(img, file)
}

// layer is a tar of the binaries in dir.
func layer(dir string) ([]byte, error) {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	head := tar.Header{Typeflag: tar.TypeDir, Name: path.Base(binDir) + "/", Mode: 0o755, ModTime: epoch}
	if err := w.WriteHeader(&head); err != nil {
		return nil, err
	}
	for _, name := range binaries {
		content, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return nil, err
		}
		head := tar.Header{
			Typeflag: tar.TypeReg, Name: path.Join(path.Base(binDir), name), Mode: 0o755, Size: int64(len(content)), ModTime: epoch,
		}
		if err := w.WriteHeader(&head); err != nil {
			return nil, err
		}
		if _, err := w.Write(content); err != nil {
			return nil, err
		}
	}
	return out.Bytes(), w.Close()
}
