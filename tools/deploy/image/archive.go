package main

import (
	"archive/tar"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
)

// The names by which those who load an archive know an image: containerd and
// Docker by the first, others by the second.
const (
	imageName = "io.containerd.image.name"
	refName   = "org.opencontainers.image.ref.name"
)

// write puts the index into an OCI archive: the layout as a tar.
func write(out, as string, index v1.ImageIndex) (v1.Hash, error) {
	tag, err := name.NewTag(as)
	if err != nil {
		return v1.Hash{}, fmt.Errorf("-name %q: %w", as, err)
	}
	digest, err := index.Digest()
	if err != nil {
		return v1.Hash{}, err
	}
	dir, err := os.MkdirTemp("", "image")
	if err != nil {
		return v1.Hash{}, err
	}
	defer os.RemoveAll(dir)
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		return v1.Hash{}, fmt.Errorf("write the image: %w", err)
	}
	if err := path.AppendIndex(index, layout.WithAnnotations(map[string]string{
		imageName: tag.Name(), refName: tag.TagStr(),
	})); err != nil {
		return v1.Hash{}, fmt.Errorf("write the image: %w", err)
	}
	return digest, archive(out, dir)
}

// archive writes everything in dir, in the order of the names, as a tar that says
// nothing of when and by whom it was written.
func archive(out, dir string) (err error) {
	next := out + ".next"
	f, err := os.Create(next)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(next)
		}
	}()
	w := tar.NewWriter(f)
	err = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		return add(w, dir, path, entry)
	})
	if closeErr := w.Close(); err == nil {
		err = closeErr
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", out, err)
	}
	return os.Rename(next, out)
}

// add writes one file or directory.
func add(w *tar.Writer, dir, path string, entry fs.DirEntry) error {
	as, err := filepath.Rel(dir, path)
	if err != nil {
		return err
	}
	if entry.IsDir() {
		return w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: filepath.ToSlash(as) + "/", Mode: 0o755, ModTime: epoch})
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	head := tar.Header{Typeflag: tar.TypeReg, Name: filepath.ToSlash(as), Mode: 0o644, Size: info.Size(), ModTime: epoch}
	if err := w.WriteHeader(&head); err != nil {
		return err
	}
	_, err = io.Copy(w, f)
	return err
}
