module github.com/aryk/aryk/clients/go

go 1.19
