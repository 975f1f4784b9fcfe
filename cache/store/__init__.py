"""The store on the SSD: generation folders, their trees and their indexes."""
