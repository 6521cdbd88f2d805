// Command release writes what a release has beside the image: the manifests and the chart, which name that image, the files
// for the /etc of a host and of one with Docker, and an archive of the binaries for each architecture. It runs in tools/deploy, and makes the same bytes from the same files.
//
//	release -image registry.example/ebpf-cni:v1.0.0 -version v1.0.0 -out DIRECTORY .../amd64 .../arm64
//
// The last arguments are directories of binaries, each with the name of their architecture.
package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"time"
)

// defaultImage is what the manifests and the chart name in the repository.
const defaultImage = "localhost/ebpf-cni:latest"

func main() {
	if err := run(os.Args[1:]); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "release:", err)
		}
		os.Exit(1)
	}
}

func run(args []string) error {
	flags := flag.NewFlagSet("release", flag.ContinueOnError)
	image := flags.String("image", defaultImage, "name of the image, with its tag")
	version := flags.String("version", "unknown", "version of the binaries")
	out := flags.String("out", "", "the directory to write into")
	from := flags.String("from", ".", "where the manifests and the chart are")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *out == "" {
		return errors.New("-out: not given; takes the directory to write into")
	}
	if err := os.MkdirAll(*out, 0o755); err != nil {
		return err
	}
	for _, name := range []string{"ebpf-cni.yaml", "cleanup.yaml"} {
		text, err := os.ReadFile(filepath.Join(*from, name))
		if err != nil {
			return err
		}
		if text, err = naming(name, text, *image); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(*out, name), text, 0o644); err != nil {
			return err
		}
	}
	files, err := chart(filepath.Join(*from, "chart"), *image, *version)
	if err != nil {
		return err
	}
	if err := archive(filepath.Join(*out, "ebpf-cni-chart.tgz"), files); err != nil {
		return err
	}
	for _, name := range []string{"host", "docker"} {
		if files, err = tree(filepath.Join(*from, name), ""); err != nil {
			return err
		}
		if err := archive(filepath.Join(*out, "ebpf-cni-"+name+".tgz"), files); err != nil {
			return err
		}
	}
	for _, dir := range flags.Args() {
		if files, err = binaries(dir); err != nil {
			return err
		}
		if err := archive(filepath.Join(*out, "ebpf-cni-linux-"+filepath.Base(dir)+".tgz"), files); err != nil {
			return err
		}
	}
	return nil
}

// file is one file of an archive.
type file struct {
	name    string
	mode    int64
	content []byte
}

// naming is a file's text with the name of the release's image.
func naming(name string, text []byte, image string) ([]byte, error) {
	if !bytes.Contains(text, []byte(defaultImage)) {
		return nil, fmt.Errorf("%s does not name %s, which the release's image replaces", name, defaultImage)
	}
	return bytes.ReplaceAll(text, []byte(defaultImage), []byte(image)), nil
}

// chart is what the chart's archive holds.
func chart(dir, image, version string) ([]file, error) {
	files, err := tree(dir, "ebpf-cni")
	for i, f := range files {
		switch path.Base(f.name) {
		case "values.yaml":
			files[i].content, err = naming(f.name, f.content, image)
		case "Chart.yaml":
			files[i].content = versioned(f.content, version)
		}
	}
	return files, err
}

// tree is the files below a directory, by their names there below root.
func tree(dir, root string) (files []file, err error) {
	below := os.DirFS(dir)
	err = fs.WalkDir(below, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := fs.ReadFile(below, name)
		files = append(files, file{path.Join(root, name), 0o644, content})
		return err
	})
	return files, err
}

// versioned is Chart.yaml with the version. Helm wants a semantic one for the chart: a commit that no tag precedes becomes
// build metadata of the one that is there.
func versioned(text []byte, version string) []byte {
	chartVersion, appVersion := regexp.MustCompile(`(?m)^version: (.*)$`), regexp.MustCompile(`(?m)^appVersion: .*$`)
	semantic := regexp.MustCompile(`^v?([0-9]+\.[0-9]+\.[0-9]+([-+].*)?)$`)
	of := "${1}+" + version
	if parts := semantic.FindStringSubmatch(version); parts != nil {
		of = parts[1]
	}
	text = chartVersion.ReplaceAll(text, []byte("version: "+of))
	return appVersion.ReplaceAll(text, fmt.Appendf(nil, "appVersion: %q", version))
}

// binaries are what an architecture's archive holds.
func binaries(dir string) (files []file, err error) {
	for _, name := range []string{"ebpf-agent", "ebpf-cni", "ebpfctl"} {
		content, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return nil, err
		}
		files = append(files, file{name, 0o755, content})
	}
	return files, nil
}

// archive writes a compressed tar that says nothing of when and by whom it was written.
func archive(out string, files []file) error {
	var content bytes.Buffer
	zip := gzip.NewWriter(&content)
	w := tar.NewWriter(zip)
	for _, f := range files {
		head := tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: f.mode, Size: int64(len(f.content)), ModTime: time.Unix(0, 0).UTC()}
		if err := w.WriteHeader(&head); err != nil {
			return err
		}
		if _, err := w.Write(f.content); err != nil {
			return err
		}
	}
	if err := errors.Join(w.Close(), zip.Close()); err != nil {
		return err
	}
	return os.WriteFile(out, content.Bytes(), 0o644)
}
