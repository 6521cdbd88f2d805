package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// kernel is what a machine boots.
type kernel struct {
	// name for people: 6.1, or the image's path.
	name string
	// series such as 6.1; empty for an image by path until it has booted.
	series  string
	image   string
	modules string
	// release is what the image says of itself.
	release string
	loaded  []module
}

var seriesText = regexp.MustCompile(`^[0-9]+\.[0-9]+$`)

// findKernel takes a series, whose package it fetches, or the path of an image whose modules stand in a directory.
func findKernel(ctx context.Context, what, modules, cache string) (kernel, error) {
	if !seriesText.MatchString(what) {
		if _, err := os.Stat(what); err != nil {
			return kernel{}, fmt.Errorf("KERNEL=%s: neither a series such as 6.1 nor a kernel image: %w", what, err)
		}
		if modules == "" {
			return kernel{}, fmt.Errorf("KERNEL=%s is an image: say with MODULES=DIR where its modules are (/lib/modules/VERSION)", what)
		}
		release, err := imageRelease(what)
		return kernel{name: what, image: what, modules: modules, release: release}, err
	}
	if modules != "" {
		return kernel{}, fmt.Errorf("MODULES=%s goes with KERNEL=FILE; the package of Linux %s brings its own", modules, what)
	}
	dir, err := fetch(ctx, what, filepath.Join(cache, what))
	if err != nil {
		return kernel{}, fmt.Errorf("fetch Debian's Linux %s: %w", what, err)
	}
	images, err := filepath.Glob(filepath.Join(dir, "boot", "vmlinuz-*"))
	if err != nil || len(images) != 1 {
		return kernel{}, fmt.Errorf("%s holds %d kernel images, want 1 (remove the directory to have it fetched again)", dir, len(images))
	}
	release, err := imageRelease(images[0])
	return kernel{name: what, series: what, image: images[0], modules: filepath.Join(dir, "lib", "modules"), release: release}, err
}

// fetch returns the directory of the unpacked package of a series, from the cache or from Debian's archive.
func fetch(ctx context.Context, series, cache string) (string, error) {
	p, err := resolve(ctx, series)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(filepath.Dir(cache), 0o755); err != nil {
		return "", err
	}
	lock, err := bpffs.File(ctx, cache+".lock") // another run may be fetching it
	if err != nil {
		return "", err
	}
	defer lock.Release()
	dir := filepath.Join(cache, strings.TrimSuffix(p.file, ".deb"))
	if _, err := os.Stat(dir); err == nil {
		return dir, nil // renamed into its place when it was complete, and its package has been checked
	}
	// One at a time: what an older package or an interrupted run left goes.
	if err := os.RemoveAll(cache); err != nil {
		return "", err
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	fmt.Fprintf(os.Stderr, "test-kernels: fetching %s\n", p.file)
	if err := run(ctx, cache, "apt-get", "-q", "-o", "Acquire::Retries=3", "download", p.name); err != nil {
		return "", err
	}
	deb := filepath.Join(cache, p.file)
	if err := verify(deb, p.sha256); err != nil {
		return "", err
	}
	if err := run(ctx, cache, "dpkg", "-x", deb, dir+".part"); err != nil {
		return "", err
	}
	if err := os.Remove(deb); err != nil {
		return "", err
	}
	return dir, os.Rename(dir+".part", dir)
}

// debian is a package as apt's lists, which are signed, describe it.
type debian struct{ name, file, sha256 string }

// resolve finds the image that Debian's metapackages of a series stand for today.
func resolve(ctx context.Context, series string) (debian, error) {
	name, err := findImage(ctx, series)
	if err != nil {
		return debian{}, err
	}
	line, err := output(ctx, "apt-get", "-q", "download", "--print-uris", name)
	if err != nil {
		return debian{}, err
	}
	return parseURI(name, line)
}

// parseURI reads what apt-get download --print-uris says: 'URI' FILE SIZE SHA256:SUM.
func parseURI(name, line string) (debian, error) {
	fields := strings.Fields(line)
	if len(fields) < 4 {
		return debian{}, fmt.Errorf("apt-get says of %s: %q", name, line)
	}
	sum, ok := strings.CutPrefix(fields[3], "SHA256:")
	if !ok || filepath.Base(fields[1]) != fields[1] {
		return debian{}, fmt.Errorf("apt-get says of %s: %q", name, line)
	}
	return debian{name: name, file: fields[1], sha256: sum}, nil
}

// findImage asks the metapackages; when apt knows none of them, its lists may be missing or old.
func findImage(ctx context.Context, series string) (string, error) {
	metas := []string{"linux-image-" + series + "-amd64", "linux-image-amd64"}
	for try := range 2 {
		if try == 1 {
			fmt.Fprintln(os.Stderr, "test-kernels: apt-get update")
			if err := run(ctx, "", "apt-get", "-q", "update"); err != nil {
				return "", err
			}
		}
		for _, meta := range metas {
			// A metapackage that is not known is no news: the other one may be.
			text, err := output(ctx, "apt-cache", "depends", "--no-recommends", "--no-suggests", meta)
			if errors.Is(err, exec.ErrNotFound) {
				return "", fmt.Errorf("%w: this is not Debian; use KERNEL=FILE MODULES=DIR", err)
			}
			if name, ok := imageIn(text, series); ok {
				return name, nil
			}
		}
	}
	return "", fmt.Errorf("neither %s depends on a Linux %s here; use KERNEL=FILE MODULES=DIR", strings.Join(metas, " nor "), series)
}

// imageIn finds the image of the series among a metapackage's dependencies.
func imageIn(depends, series string) (string, bool) {
	words := strings.Fields(depends)
	i := slices.IndexFunc(words, func(w string) bool { return strings.HasPrefix(w, "linux-image-"+series+".") })
	if i < 0 {
		return "", false
	}
	return words[i], true
}

// verify compares a file with its checksum in apt's lists.
func verify(path, sum string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return err
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != sum {
		return fmt.Errorf("%s has SHA-256 %s, apt's lists say %s", path, got, sum)
	}
	return nil
}

// run runs a command quietly; its output is in the error.
func run(ctx context.Context, dir, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

func output(ctx context.Context, name string, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, name, args...).Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), err)
	}
	return string(out), nil
}
