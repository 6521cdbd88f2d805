package measure

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// imageFile is the archive in a cluster's directory that its nodes have been given.
const imageFile = "ebpf-cni.tar"

// image measures the image that the cluster's nodes have, which is what make image makes for their architecture.
func image(c *cluster.Cluster, p *printer) error {
	compressed, unpacked, err := imageSize(filepath.Join(c.Dir, imageFile))
	if err != nil {
		return fmt.Errorf("measure the image: %w", err)
	}
	p.say("the image is %.1f MiB, unpacked %.1f MiB", compressed/(1<<20), unpacked/(1<<20))
	return p.line(Sample{Workload: Image, Mode: ours, Round: 1, Started: time.Now(), Values: map[string]float64{
		"compressed": compressed, "unpacked": unpacked,
	}})
}

// imageSize sums up the layers of the one image in an OCI archive, as a registry has them and as files.
func imageSize(archive string) (compressed, unpacked float64, err error) {
	dir, err := os.MkdirTemp("", "image")
	if err != nil {
		return 0, 0, err
	}
	defer os.RemoveAll(dir)
	if err := untar(archive, dir); err != nil {
		return 0, 0, err
	}
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return 0, 0, err
	}
	img, err := onlyImage(index)
	if err != nil {
		return 0, 0, err
	}
	layers, err := img.Layers()
	if err != nil {
		return 0, 0, err
	}
	for _, layer := range layers {
		size, err := layer.Size()
		if err != nil {
			return 0, 0, err
		}
		files, err := contentSize(layer)
		if err != nil {
			return 0, 0, err
		}
		compressed, unpacked = compressed+float64(size), unpacked+files
	}
	return compressed, unpacked, nil
}

// onlyImage goes down the indexes of an archive, which have one entry each.
func onlyImage(index v1.ImageIndex) (v1.Image, error) {
	manifest, err := index.IndexManifest()
	if err != nil {
		return nil, err
	}
	if len(manifest.Manifests) != 1 {
		return nil, fmt.Errorf("an index has %d entries, want one", len(manifest.Manifests))
	}
	entry := manifest.Manifests[0]
	if entry.MediaType.IsImage() {
		return index.Image(entry.Digest)
	}
	below, err := index.ImageIndex(entry.Digest)
	if err != nil {
		return nil, err
	}
	return onlyImage(below)
}

// contentSize is that of a layer's files.
func contentSize(layer v1.Layer) (size float64, err error) {
	content, err := layer.Uncompressed()
	if err != nil {
		return 0, err
	}
	defer content.Close()
	files := tar.NewReader(content)
	for {
		head, err := files.Next()
		if errors.Is(err, io.EOF) {
			return size, nil
		}
		if err != nil {
			return 0, err
		}
		size += float64(head.Size)
	}
}

// untar unpacks an archive of this project's own making: files and directories.
func untar(archive, dir string) error {
	file, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer file.Close()
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	for files := tar.NewReader(file); ; {
		head, err := files.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read %s: %w", archive, err)
		}
		if head.Typeflag == tar.TypeDir {
			err = root.MkdirAll(filepath.Clean(head.Name), 0o755)
		} else {
			err = write(root, head.Name, files)
		}
		if err != nil {
			return err
		}
	}
}

func write(root *os.Root, name string, content io.Reader) error {
	if err := root.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	file, err := root.Create(name)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, content)
	return errors.Join(err, file.Close())
}
